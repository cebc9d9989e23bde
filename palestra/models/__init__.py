"""Models: their weights and their forward pass, shared by engine and trainer so that both round alike."""
