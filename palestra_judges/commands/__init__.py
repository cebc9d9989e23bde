"""The commands of the judges."""
