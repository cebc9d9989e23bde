"""TensorBoard: event files in `RUN/tracking/tensorboard`, for `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.tracking.registry import TrackedRun


class TensorBoardTracker:
    """Writes scalars; needs the package `tensorboard`, and no torch or TensorFlow."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._make = event_pb2.Event, summary_pb2.Summary, EventFileWriter
        self._folder = run.folder
        self._writer: Any = None

    def begin(self) -> None:
        """Start a new file, and remove the run's earlier ones."""
        if self._writer is not None:
            self._writer.close()
        for old in self._folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = self._make(str(self._folder))

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add an event with a scalar for each metric; see `Tracker`."""
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=at, step=step, summary=self._summary(value=points)))

    def flush(self) -> None:
        """Write the events to the file."""
        self._writer.flush()

    def close(self, completed: bool) -> None:
        """Close the file."""
        self._writer.close()
