"""A database that many callers write through one thread: shared by the run store and the control store."""

from palestra.database.backend import Backend
from palestra.database.database import Database, shielded, to_json
from palestra.database.notifier import WAKE_SECONDS, Notifier
from palestra.database.schema import Schema

__all__ = ["WAKE_SECONDS", "Backend", "Database", "Notifier", "Schema", "shielded", "to_json"]
