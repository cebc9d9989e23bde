"""The data plane: HTTP in front of sessions and the run store."""

from palestra.gateway.app import DataPlane, create_app
from palestra.gateway.keys import KeyRing

__all__ = ["DataPlane", "KeyRing", "create_app"]
