"""The data plane: HTTP in front of sessions and the run store."""

from palestra.gateway.app import create_app
from palestra.gateway.auth import KeyRing
from palestra.gateway.state import DataPlane

__all__ = ["DataPlane", "KeyRing", "create_app"]
