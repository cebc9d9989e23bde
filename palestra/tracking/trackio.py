"""trackio: its database in TRACKIO_DIR, else in `RUN/tracking/trackio`, for `trackio show`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from palestra.tracking.registry import TrackedRun

PROJECT = "palestra"


class TrackioTracker:
    """Writes rows of a run to trackio's database; needs the package `trackio`."""

    def __init__(self, run: TrackedRun) -> None:
        """Import the library, which reads its folder at import."""
        os.environ.setdefault("TRACKIO_DIR", str(run.folder))
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._run = run
        self._rows: list[tuple[int, dict[str, float], str]] = []
        self._settings: dict[str, Any] | None = None

    def begin(self) -> None:
        """Delete the run from the database."""
        self._rows, self._settings = [], dict(self._run.settings)
        self._storage.delete_run(PROJECT, self._run.name, run_id=self._run.key)

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Store a row for `flush`; see `Tracker`."""
        self._rows.append((step, dict(values), datetime.fromtimestamp(at, UTC).isoformat()))

    def flush(self) -> None:
        """Write the rows to the database, in one transaction."""
        if not self._rows:
            return
        steps, values, times = zip(*self._rows, strict=True)
        self._storage.bulk_log(
            PROJECT,
            self._run.name,
            list(values),
            list(steps),
            list(times),
            config=self._settings,
            run_id=self._run.key,
        )
        self._rows, self._settings = [], None

    def close(self, completed: bool) -> None:
        """Write the remaining rows."""
        self.flush()
