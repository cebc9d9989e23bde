"""MLflow: a server or a database by MLFLOW_TRACKING_URI, else files in `RUN/tracking/mlflow`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from palestra.tracking.registry import TrackedRun

EXPERIMENT = "palestra"
TAG = "palestra.run"
MOST = 500  # metrics, or parameters, of one request
LONGEST = 500  # characters of a parameter
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)  # in the names of metrics


class MlflowTracker:
    """Writes a run of MLflow; needs the package `mlflow` or `mlflow-skinny`."""

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
