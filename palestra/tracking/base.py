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
        key: stands for the run's folder: the same after a restart, and another one in another folder.
        store: file of the run's store, for trackers that show more than metrics; `browse` opens it.
        folder: where a tracker that writes files puts them; it exists, and no other tracker uses it.
        settings: values of the configuration, by dotted key.
    """

    name: str
    key: str
    store: Path
    folder: Path
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """Shows the metrics of a run to people; it is made with a `TrackedRun`, in a process of its own.

    `begin` is called first, and again whenever rows that were written are not those of the run any more, as after a
    kill and a resume; all rows follow then. All calls come from one thread, which may block.
    """

    def begin(self) -> None:
        """Start the record of the run, in place of all that this tracker has of it."""

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add the row of a step.

        Args:
            values: metrics by name, finite.
            at: Unix seconds at which the job was at this step.
        """

    def flush(self) -> None:
        """Put what was written where others can read it."""

    def close(self, completed: bool) -> None:
        """End the record.

        Args:
            completed: whether the job completed; False: it failed, was stopped or still runs.
        """


def key_of(folder: Path) -> str:
    """Return what stands for the run in a folder: 16 hexadecimal digits."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
