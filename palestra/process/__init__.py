"""Child processes of Palestra: starting and ending them, messages, and remote calls."""
