"""What takes the learner's place in a job that does not train: a model is served, or an evaluation is scored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.config import JobConfig
from palestra.engine.base import Engine
from palestra.errors import ConfigError
from palestra.learner import RunFolder
from palestra.learner.evaluation import validate
from palestra.runtime.console import models_of
from palestra.store import RunLog, RunStore
from palestra.types.progress import JobProgress, Phase
from palestra.types.records import Task
from palestra.types.states import JobState
from palestra.waiting import race

SERVED = ("calls", "prompt_tokens", "completion_tokens")  # counters that are reported at the end
Report = Callable[[str, dict[str, Any]], None]


class Serving:
    """Serves the policies of one job, in the place where a training job has its `Learner`."""

    def __init__(
        self,
        config: JobConfig,
        run_log: RunLog,
        folder: RunFolder,
        progress: JobProgress,
        report: Report,
        counts: Mapping[str, int],
    ) -> None:
        """Assemble the work; `run` serves.

        Args:
            progress: the state that `/status` shows.
            report: is called with every event, as it is recorded.
            counts: the counters of `SessionContext`.
        """
        self._config, self._log, self._folder, self._progress, self._report = config, run_log, folder, progress, report
        self._counts = counts
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make `run` record what was served and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop` is called.

        Raises:
            ConfigError: the folder has the run of a training job.
        """
        if await self._log.fact("config_digest") is not None:
            raise ConfigError(
                f"the run in {self._folder.path} trains a model; to serve it, name its checkpoint in "
                "policies.*.model, and choose another run_dir"
            )
        self._folder.write_config(self._config)
        model = models_of(self._config)
        self._progress.enter(f"serving {model}")
        self._progress.move(JobState.RUNNING)
        await self._event("serving", {"model": model})
        await self._stopping.wait()
        await self._event("served", {name: self._counts.get(name, 0) for name in SERVED})
        self._progress.move(JobState.COMPLETED)

    async def _event(self, kind: str, data: dict[str, Any]) -> None:
        await self._log.add_event(kind, data)
        self._report(kind, data)


class Scoring:
    """Scores the policies of a job on some tasks, in the place where a training job has its `Learner`."""

    def __init__(
        self,
        config: JobConfig,
        store: RunStore,
        engine: Engine,
        folder: RunFolder,
        progress: JobProgress,
        tasks: Sequence[Task],
    ) -> None:
        self._config, self._store, self._engine, self._folder = config, store, engine, folder
        self._progress, self._tasks = progress, tasks
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make `run` return, with the tasks that are scored so far."""
        self._stopping.set()

    async def run(self) -> None:
        """Score every task once, or until `stop` is called."""
        self._folder.write_config(self._config)
        await self._engine.resume()
        self._progress.move(JobState.RUNNING)
        self._progress.enter("evaluating", Phase("validation", 0))
        try:
            roles = self._config.players
            algorithm = self._config.algorithm_of(roles.default)
            scoring = validate(self._store.groups, self._tasks, 0, roles, algorithm)
            winner = await race(scoring, self._stopping.wait())
            if winner.index == 0:
                self._progress.move(JobState.COMPLETED)
        finally:
            self._store.episodes.available.notify()
