"""The work of a job that does not train, in place of the learner: serving a model, or scoring an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from palestra.errors import ConfigError
from palestra.learner import OpenRun
from palestra.learner.evaluation import validate
from palestra.runtime.console import models_of
from palestra.types.progress import Phase
from palestra.types.records import Task
from palestra.types.states import JobState
from palestra.waiting import race

SERVED = ("calls", "prompt_tokens", "completion_tokens")  # counters that are reported at the end


class Serving:
    """Serves the policies of a job, in place of a `Learner`."""

    def __init__(self, run: OpenRun, counts: Mapping[str, int]) -> None:
        """Create the work with the counters of `SessionContext`; `run` serves."""
        self._run = run
        self._counts = counts
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make `run` record the totals and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop` is called."""
        if await self._run.store.log.fact("config_digest") is not None:
            raise ConfigError(
                f"the run in {self._run.folder.path} trains a model; to serve it, name its checkpoint in "
                "policies.*.model, and choose another run_dir"
            )
        self._run.folder.write_config(self._run.config)
        model = models_of(self._run.config)
        self._run.progress.enter(f"serving {model}")
        self._run.progress.move(JobState.RUNNING)
        await self._run.event("serving", {"model": model})
        await self._stopping.wait()
        if self._run.metering is not None:
            await self._run.metering.told_if_over()
        if self._run.progress.over:  # its time was used up meanwhile
            return
        await self._run.event("served", {name: self._counts.get(name, 0) for name in SERVED})
        if not self._run.progress.over:
            self._run.progress.move(JobState.COMPLETED)


class Scoring:
    """Scores the policies of a job on some tasks, in place of a `Learner`."""

    def __init__(self, run: OpenRun, tasks: Sequence[Task]) -> None:
        self._run, self._tasks = run, tasks
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make `run` return with the tasks scored so far."""
        self._stopping.set()

    async def run(self) -> None:
        """Score every task once, or until `stop` is called."""
        self._run.folder.write_config(self._run.config)
        await self._run.engine.resume()
        self._run.sampling.set()
        self._run.progress.move(JobState.RUNNING)
        self._run.progress.enter("evaluating", Phase("validation", 0))
        try:
            roles = self._run.config.players
            algorithm = self._run.config.algorithm_of(roles.default)
            scoring = validate(self._run.store.groups, self._tasks, 0, roles, algorithm)
            winner = await race(scoring, self._stopping.wait())
            if winner.index == 0:
                self._run.progress.move(JobState.COMPLETED)
        finally:
            self._run.store.episodes.available.notify()
