"""Open the database of a run, and bundle the parts that work on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from palestra.config import RolloutConfig, StoreConfig
from palestra.database import Backend, Database
from palestra.database.sqlite import make_private, open_engine
from palestra.disk import writing
from palestra.ledger import tables
from palestra.ledger.calls import Calls
from palestra.ledger.damage import OpenFile, store_error
from palestra.ledger.episodes import Episodes
from palestra.ledger.groups import Groups
from palestra.ledger.leases import LeaseBook
from palestra.ledger.run_log import RunLog
from palestra.ledger.tasks import Tasks
from palestra.schemas.clock import Clock, SystemClock


@dataclass(frozen=True, kw_only=True)
class RunStore:
    """The store of one run: a bundle of parts, of which each component gets only those that it needs.

    A context manager that closes the store.

    Attributes:
        db: the run's database.
        clock: of all recorded times, and of the leases.
        leases: of the episodes that are claimed now.
        tasks: the inputs of the episodes.
        episodes: claims and ends, for workers.
        calls: the recorded calls, for sessions; and trajectories, for the learner.
        groups: episodes of one task, for the learner.
        log: manifests, metrics, events and facts of the run.
    """

    db: Database
    clock: Clock
    leases: LeaseBook
    tasks: Tasks
    episodes: Episodes
    calls: Calls
    groups: Groups
    log: RunLog

    def close(self) -> None:
        """Finish the submitted operations and close the file."""
        self.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run_store(path: Path, rollout: RolloutConfig, store: StoreConfig, clock: Clock | None = None) -> RunStore:
    """Open the store of a run, or create it.

    Args:
        path: of its file, `run.db`.
        rollout: the limits of claims, leases and attempts.
        store: how durable a commit is.
        clock: of times and leases; None: the system's.

    Raises:
        StoreError: the file can't be written, is not a run store, is damaged, or of a newer version of Palestra.
    """
    clock = clock or SystemClock()
    with writing(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(path)
    backend = Backend(
        engine=open_engine(path, store.synchronous),
        read_engine=open_engine(path, store.synchronous, read_only=True),
        readers=1,
        explain=partial(store_error, path),
        watch=lambda: OpenFile(path).problem,
    )
    db = Database(backend, tables.SCHEMA)
    try:
        leases = LeaseBook(clock, rollout.max_episode_seconds)
        episodes = Episodes(db, leases, rollout, clock)
    except BaseException:
        db.close()
        raise
    return RunStore(
        db=db,
        clock=clock,
        leases=leases,
        tasks=Tasks(db),
        episodes=episodes,
        calls=Calls(db),
        groups=Groups(db, episodes.available, episodes.settled),
        log=RunLog(db, clock),
    )
