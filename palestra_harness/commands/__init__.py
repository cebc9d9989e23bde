"""The commands of the harnesses."""
