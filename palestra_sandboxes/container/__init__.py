"""Boxes of podman or docker."""
