"""The run store: tasks, episodes, calls, manifests, metrics and events of one job, in SQLite."""

from palestra.store.calls import Calls
from palestra.store.episodes import Episodes
from palestra.store.groups import Groups
from palestra.store.run_log import RunLog
from palestra.store.run_store import RunStore, open_run_store
from palestra.store.tasks import Tasks

__all__ = ["Calls", "Episodes", "Groups", "RunLog", "RunStore", "Tasks", "open_run_store"]
