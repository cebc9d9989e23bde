"""The data plane: the HTTP server of one job, for workers, model calls in four dialects, and clients."""

from palestra.server.app import create_app
from palestra.server.auth import KeyRing
from palestra.server.state import DataPlane

__all__ = ["DataPlane", "KeyRing", "create_app"]
