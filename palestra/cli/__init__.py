"""The `palestra` command."""
