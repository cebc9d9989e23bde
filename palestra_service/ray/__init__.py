"""The only place that knows Ray: a cluster, model servers as actors, and the control plane that is wired to them."""
