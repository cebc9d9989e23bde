"""Records, states and protocols that more than one room uses."""
