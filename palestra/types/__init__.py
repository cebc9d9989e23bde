"""Records, lifecycles and wire formats shared by several packages."""
