"""The control plane: tenants, users and keys, the queue, placement, and the lifecycle of jobs. No token passes here."""
