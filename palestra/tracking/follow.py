"""Hand the rows of a run to a tracker, each once, from the run's store: while the job runs, or afterwards."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, func, select

from palestra.config import JobConfig, load_saved_config
from palestra.errors import StoreError
from palestra.store.browsing import browse, last_state
from palestra.store.tables import events, metric_rows
from palestra.tracking.registry import TrackedRun, Tracker, key_of

FOLDER = "tracking"
RESERVE = 256 * 2**20  # bytes that a tracker leaves free for the run, which needs them more
PIECE = 500  # rows that are read together


def tracked_run(folder: Path, name: str) -> TrackedRun:
    """Return a run as a tracker names it, and create the folder for the tracker's files."""
    config = load_saved_config(folder)
    files = folder / FOLDER / name
    files.mkdir(mode=0o700, parents=True, exist_ok=True)
    return TrackedRun(
        name=config.name, key=key_of(folder), store=folder / "run.db", folder=files, settings=_settings(config)
    )


def _settings(config: JobConfig) -> dict[str, Any]:
    """Return the values of a configuration by dotted key, without where the job runs."""
    found: dict[str, Any] = {}

    def add(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping) and value:
                add(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = value

    add(config.model_dump(mode="json", exclude={"server", "run_dir"}), "")
    return found


def check_disk(folder: Path) -> None:
    """Check that the disk has space for a tracker's files."""
    if shutil.disk_usage(folder).free < RESERVE:
        raise StoreError(f"less than {RESERVE // 2**20} MiB are free; what is left is for the run itself")


class Follower:
    """Sends the rows of one run to one tracker, and starts over when sent rows have changed."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        self._path, self._folder, self._tracker = folder / "run.db", folder, tracker
        self._begun, self._last, self._digest = False, -1, b""  # of the rows that were handed over

    def look(self) -> int:
        """Send new rows, and return how many."""
        check_disk(self._folder)
        written = 0
        with browse(self._path) as connection:
            if not self._begun or not self._unchanged(connection):
                self._tracker.begin()
                self._begun, self._last = True, -1
            while rows := self._next(connection):
                for step, data, at in rows:
                    self._tracker.write(step, _finite(orjson.loads(data)), at)
                    self._last, self._digest = step, _digest(data)
                    written += 1
        if written:
            self._tracker.flush()
        return written

    def _unchanged(self, connection: Connection) -> bool:
        """Return whether the store has the same rows as were sent.

        A resumed job drops the rows after its checkpoint and writes them again, with other times.
        """
        last = connection.execute(select(metric_rows.c.data).where(metric_rows.c.step == self._last)).scalar()
        return self._last < 0 or (last is not None and _digest(last) == self._digest)

    def _next(self, connection: Connection) -> list[tuple[int, str, float]]:
        """Return the next rows (step, data, Unix seconds); a row whose event is not there yet waits for it."""
        ended = func.max(events.c.at).label("at")
        wanted = (
            select(metric_rows.c.step, metric_rows.c.data, ended)
            .join(events, (events.c.step == metric_rows.c.step) & (events.c.kind == "step"))
            .where(metric_rows.c.step > self._last)
            .group_by(metric_rows.c.step)
            .order_by(metric_rows.c.step)
            .limit(PIECE)
        )
        return [(row.step, row.data, row.at) for row in connection.execute(wanted)]


def _finite(row: Mapping[str, float | None]) -> dict[str, float]:
    """Return a row without its step and without non-finite numbers, which JSON has as null."""
    return {k: float(v) for k, v in row.items() if k != "step" and v is not None and math.isfinite(v)}


def _digest(data: str) -> bytes:
    return hashlib.sha256(data.encode()).digest()


def completed(folder: Path) -> bool:
    """Return whether the job of a run has completed."""
    with browse(folder / "run.db") as connection:
        last = last_state(connection)
        return last is not None and last.kind == "completed"


def follow_run(folder: Path, tracker: Tracker, pause: Callable[[], bool]) -> int:
    """Send the rows of a run to a tracker until the job is over, and return how many. `tracker`: is closed at the end.
    `pause`: waits a little; returns False when the job is over, after which the store is read once more.
    """
    follower, written, going = Follower(folder, tracker), 0, True
    while going:
        written += follower.look()
        going = pause()
    written += follower.look()
    tracker.close(completed(folder))
    return written
