"""Sandboxes for programs: bubblewrap on this machine, and containers of podman or docker."""
