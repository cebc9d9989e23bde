"""`palestra.load_run`: a run's folder as an object for notebooks, which reads what is asked for and no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection

from palestra.client.curves import REWARDS, LiveCurves
from palestra.config import JobConfig, load_saved_config
from palestra.doctor.examination import Finding, examine
from palestra.errors import NotFound
from palestra.notebook.frames import Columns, FrameLibrary, frame_library, frame_of
from palestra.notebook.tables import call_columns, episode_columns, episodes_where, token_columns
from palestra.store.browsing import browse
from palestra.store.run_log import read_events, readable_metrics
from palestra.types.records import EpisodeKind

OVER = ("completed", "failed", "served")
MOST_EVENTS = 500
T = TypeVar("T")


class RecordedRun:
    """A run in a folder, finished or running. Each method reads it as it is at that moment, and changes nothing.

    Frames are those of pandas, or of polars where pandas is not installed or `frames="polars"` was asked for.
    """

    def __init__(self, path: Path | str, frames: FrameLibrary | None = None) -> None:
        """Make the object without reading the run; `load_run` is the short way.

        Args:
            path: folder of the run.
            frames: `pandas` or `polars`; None: the first of these that is installed.

        Raises:
            NotFound: the folder is not that of a run.
        """
        self.path = Path(path)
        self._frames = frames
        if not (self.path / "run.db").is_file():
            raise NotFound(f"{self.path} is not the folder of a run (it has no run.db)")

    def __repr__(self) -> str:
        """Return the call that makes the object."""
        return f"load_run({str(self.path)!r})"

    @property
    def config(self) -> JobConfig:
        """Return the configuration of the run.

        Raises:
            ConfigError: there is none, or it can't be read.
        """
        return load_saved_config(self.path)

    def metrics(self) -> Any:
        """Return a frame with a row for each finished step, and a column for each metric (docs/metrics.md).

        Raises:
            ModuleNotFoundError: neither pandas nor polars is installed.
            StoreError: the run can't be read.
        """
        return self._frame(lambda connection: _metric_columns(readable_metrics(connection).rows))

    def episodes(
        self, kind: EpisodeKind | None = None, state: str | None = "completed", step: int | None = None
    ) -> Any:
        """Return a frame with a row for each episode, in canonical order; `rewards` and `metadata` are JSON.

        Args:
            kind: `train`, `validation` or `adhoc`; None: all.
            state: such as `completed`; None: all.
            step: the step that trains them or, of validation, before which they are scored; None: all.

        Raises:
            ModuleNotFoundError: neither pandas nor polars is installed.
            StoreError: the run can't be read.
        """
        return self._frame(lambda connection: episode_columns(connection, episodes_where(kind, state, step)))

    def calls(self, episode_id: str | None = None, *, kind: EpisodeKind | None = None, step: int | None = None) -> Any:
        """Return a frame with a row for each model call of completed episodes; `reply` is the message as JSON.

        Args:
            episode_id: of the only episode, completed or not; None: all completed ones.
            kind: of the episodes; None: all.
            step: of the episodes, as in `episodes`; None: all.

        Raises:
            ModuleNotFoundError: neither pandas nor polars is installed.
            StoreError: the run can't be read.
        """
        state = None if episode_id else "completed"
        return self._frame(lambda connection: call_columns(connection, episodes_where(kind, state, step, episode_id)))

    def tokens(self, episode_id: str | None = None, *, kind: EpisodeKind | None = None, step: int | None = None) -> Any:
        """Return a frame with a row for each sampled token of completed episodes: id, logprob, version, call.

        A long run has millions of tokens: name an episode or a step.

        Args:
            episode_id: of the only episode, completed or not; None: all completed ones.
            kind: of the episodes; None: all.
            step: of the episodes, as in `episodes`; None: all.

        Raises:
            ModuleNotFoundError: neither pandas nor polars is installed.
            StoreError: the run can't be read.
        """
        state = None if episode_id else "completed"
        return self._frame(lambda connection: token_columns(connection, episodes_where(kind, state, step, episode_id)))

    def findings(self) -> list[Finding]:
        """Return what goes wrong in the run, as `palestra doctor` says it (docs/doctor.md).

        Raises:
            StoreError: the run can't be read.
        """
        return list(examine(self.path).findings)

    def draw(self, metrics: Sequence[str] = REWARDS) -> Any:
        """Return a figure of matplotlib with a curve for each metric that the run has.

        Args:
            metrics: names, as in `metrics`.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            StoreError: the run can't be read.
        """
        curves = LiveCurves(metrics, self.path.name)
        curves.add(self._read(lambda connection: readable_metrics(connection).rows))
        return curves.figure

    def watch(self, metrics: Sequence[str] = REWARDS, *, seconds: float = 2.0) -> str:
        """Draw the run's curves in a notebook, again after each step, until the job is over.

        Interrupting the cell ends the drawing, and leaves the job running.

        Args:
            metrics: names, as in `metrics`.
            seconds: how long to wait between two looks.

        Returns:
            `completed`, `failed` or `served`; `interrupted`, if the cell was.

        Raises:
            ModuleNotFoundError: matplotlib or IPython is not installed.
            StoreError: the run can't be read.
        """
        curves, last, state = LiveCurves(metrics, self.path.name), 0, ""
        curves.show()
        try:
            while True:
                # Events are read first: what comes between the two reads is then drawn by the next look.
                found = self._read(lambda connection, last=last: read_events(connection, last, MOST_EVENTS))  # type: ignore[misc]
                curves.replace(self._read(lambda connection: readable_metrics(connection).rows))
                for event in found:
                    last, state = event.event_id, event.kind if event.kind in ("running", *OVER) else state
                if state in OVER and len(found) < MOST_EVENTS:
                    return state
                time.sleep(seconds)
        except KeyboardInterrupt:
            return "interrupted"

    def _read(self, query: Callable[[Connection], T]) -> T:
        with browse(self.path / "run.db") as connection:
            return query(connection)

    def _frame(self, query: Callable[[Connection], Columns]) -> Any:
        library = frame_library(self._frames)  # before reading, which may take long
        return frame_of(self._read(query), library)


def load_run(path: Path | str, *, frames: FrameLibrary | None = None) -> RecordedRun:
    """Return a run in a folder, finished or running, for a notebook; nothing is read before it is asked for.

    Args:
        path: folder of the run, such as `TrainResult.run_dir`.
        frames: whose frames its methods return, `pandas` or `polars`; None: the first of these that is installed.

    Raises:
        NotFound: the folder is not that of a run.
    """
    return RecordedRun(path, frames)


def _metric_columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the columns of rows of metrics: step first, numbers as floats, None where a row has none."""
    names = sorted({name for row in rows for name in row} - {"step"})
    columns: dict[str, list[Any]] = {"step": [int(row["step"]) for row in rows]}
    return columns | {name: [None if name not in row else float(row[name]) for row in rows] for name in names}
