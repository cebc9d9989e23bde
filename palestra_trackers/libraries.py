"""Trackers that write to TensorBoard, W&B, MLflow and trackio, each through its own library."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from palestra.tracking.registry import TrackedRun

EXPERIMENT = "palestra"
TAG = "palestra.run"
MOST = 500  # metrics, or parameters, of one request
LONGEST = 500  # characters of a parameter
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)  # in the names of metrics


class MlflowTracker:
    """Writes a run of MLflow, to MLFLOW_TRACKING_URI or `RUN/tracking/mlflow`; needs `mlflow` or `mlflow-skinny`."""

    def __init__(self, run: TrackedRun) -> None:
        # The store of files needs no database; MLflow wants to hear that it is meant.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._make = Metric, Param, MlflowClient
        self._run = run
        self._client: Any = None
        self._id = ""

    def begin(self) -> None:
        """Create the run of MLflow, and delete earlier ones of the same folder."""
        run = self._run
        uri = os.environ.get("MLFLOW_TRACKING_URI") or run.folder.resolve().as_uri()
        self._client = self._make(tracking_uri=uri)
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = self._client.create_experiment(EXPERIMENT) if known is None else known.experiment_id
        for old in self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.key}'"):
            self._client.delete_run(old.info.run_id)
        created = self._client.create_run(experiment, tags={TAG: run.key}, run_name=run.name)
        self._id = created.info.run_id
        params = [self._param(name, str(value)[:LONGEST]) for name, value in run.settings.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add a point to each metric; see `Tracker`."""
        points = [
            self._metric(_NOT_ALLOWED.sub("_", name), value, int(at * 1000), step) for name, value in values.items()
        ]
        for start in range(0, len(points), MOST):
            self._client.log_batch(self._id, metrics=points[start : start + MOST])

    def flush(self) -> None:
        """Do nothing: each request is answered when it is stored."""

    def close(self, completed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FINISHED" if completed else "KILLED")


class TensorBoardTracker:
    """Writes event files to `RUN/tracking/tensorboard`; needs the package `tensorboard`, no torch or TensorFlow."""

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


PROJECT = "palestra"


class TrackioTracker:
    """Writes to trackio's database in TRACKIO_DIR, or `RUN/tracking/trackio`; needs the package `trackio`."""

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


class WandbTracker:
    """Writes `RUN/tracking/wandb` without network, which `wandb sync` uploads; needs the package `wandb`."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb: Any = wandb
        self._of = run
        self._run: Any = None

    def begin(self) -> None:
        """Start the run of W&B and remove its earlier folders, so that an upload has each row once."""
        if self._run is not None:
            self._run.finish()
        run = self._of
        shutil.rmtree(run.folder / "wandb", ignore_errors=True)
        os.environ["WANDB_SILENT"] = "true"
        settings = self._wandb.Settings(x_disable_stats=True, console="off")
        self._run = self._wandb.init(
            mode="offline",
            dir=str(run.folder),
            project="palestra",
            id=run.key,
            name=run.name,
            config=dict(run.settings),
            settings=settings,
        )

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add a row of the run's history; see `Tracker`."""
        self._run.log({**values, "_timestamp": at}, step=step)

    def flush(self) -> None:
        """Do nothing: the library's own process writes immediately."""

    def close(self, completed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=0 if completed else 1)
