"""The data plane: the HTTP server of one job, in front of its sessions and its store.

Workers claim episodes here, agents call the model in four dialects, and clients watch the job.
"""

from palestra.server.app import create_app
from palestra.server.auth import KeyRing
from palestra.server.state import DataPlane

__all__ = ["DataPlane", "KeyRing", "create_app"]
