"""Records, lifecycles and wire formats that more than one room uses."""
