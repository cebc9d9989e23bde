"""A database that many callers write through one thread: shared by the run store and the control store."""

from palestra.database.backend import Backend, Schema
from palestra.database.database import WAKE_SECONDS, Database, Notifier, shielded, to_json

__all__ = ["WAKE_SECONDS", "Backend", "Database", "Notifier", "Schema", "shielded", "to_json"]
