"""The run store: episodes, calls, manifests, metrics and events of one job, in SQLite."""

from palestra.ledger.store import WAKE_SECONDS, RunStore

__all__ = ["WAKE_SECONDS", "RunStore"]
