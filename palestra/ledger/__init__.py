"""The run store: episodes, calls, manifests, metrics and events of one job, in SQLite."""

from palestra.ledger.store import RunStore

__all__ = ["RunStore"]
