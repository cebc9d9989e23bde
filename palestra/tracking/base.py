"""What a tracker is, and what it gets to know of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run, as trackers name it.

    Attributes:
        name: of the job.
        key: identifies the run's folder: the same after a restart, another one in another folder.
        store: file of the run's store, for trackers that show more than metrics; open it with `browse`.
        folder: for files of this tracker; exists.
        settings: values of the configuration, by dotted key.
    """

    name: str
    key: str
    store: Path
    folder: Path
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """Shows the metrics of a run to people; constructed with a `TrackedRun`, in its own process.

    `begin` is called first, and again when rows already written were replaced, as after a kill and resume; all rows
    follow again. All calls come from one thread, which may block.
    """

    def begin(self) -> None:
        """Start the record of the run, replacing everything that this tracker has of it."""

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add the row of a step.

        Args:
            values: metrics by name, finite.
            at: Unix time of the step, in seconds.
        """

    def flush(self) -> None:
        """Make the written rows visible to others."""

    def close(self, completed: bool) -> None:
        """End the record.

        Args:
            completed: whether the job completed; False: it failed, was stopped or is still running.
        """


def key_of(folder: Path) -> str:
    """Return a key for the run in a folder: 16 hexadecimal digits."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
