"""The run store: tasks, episodes, calls, manifests, metrics and events of one job, in SQLite."""

from palestra.ledger.calls import Calls
from palestra.ledger.episodes import Episodes
from palestra.ledger.groups import Groups
from palestra.ledger.run_log import RunLog
from palestra.ledger.run_store import RunStore, open_run_store
from palestra.ledger.tasks import Tasks

__all__ = ["Calls", "Episodes", "Groups", "RunLog", "RunStore", "Tasks", "open_run_store"]
