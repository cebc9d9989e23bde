"""Boxes of bubblewrap."""
