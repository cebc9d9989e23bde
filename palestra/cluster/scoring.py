"""`Scoring`: the work of an evaluation. It registers each task once and waits until all are played."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from palestra.config import JobConfig
from palestra.inference.base import Engine
from palestra.learner import RunFolder
from palestra.learner.evaluation import evaluate
from palestra.ledger import RunStore
from palestra.schemas.progress import Collecting, JobProgress
from palestra.schemas.records import Task
from palestra.schemas.states import JobState
from palestra.waiting import race


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
        self._progress.enter("evaluating", Collecting("validation", 0))
        try:
            scoring = evaluate(self._store.groups, self._tasks, 0, self._config.players)
            winner = await race(scoring, self._stopping.wait())
            if winner.index == 0:
                self._progress.move(JobState.COMPLETED)
        finally:
            self._store.episodes.available.notify()
