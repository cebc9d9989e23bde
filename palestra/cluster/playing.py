"""`palestra.play`: agents and an environment, without training: to evaluate a model, or just to use it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from palestra.cluster.foreground import run_cancellable
from palestra.cluster.local import local_job
from palestra.config import JobConfig
from palestra.rollout import Outcome, Play, RolloutOrchestrator, Runner
from palestra.schemas.records import Trajectory

Played = Outcome[Mapping[str, Any], Trajectory | None]


def play(
    what: Play, tasks: Sequence[Mapping[str, Any]], config: JobConfig | None = None, *, concurrency: int = 64
) -> list[Played]:
    """Play one episode of each task, through the same engine, sessions and store as training does.

    Args:
        what: an environment, and who acts in it.
        tasks: JSON objects, as they are given to `reset`.
        config: the job; `policies` names the model, which may be a checkpoint's folder. Episodes are kept where it has
            a `run_dir`, to be looked at with `palestra episodes`.
        concurrency: episodes that are played at the same time.

    Returns:
        For each task, in order, its trajectory (`.result`), or what the episode failed with (`.error`).

    Raises:
        PalestraError: the engine can't be started.
        KeyboardInterrupt, SystemExit: after SIGINT, or SIGTERM (exit code 143); what was played is kept in `run_dir`.
    """
    config = config or JobConfig()
    with TemporaryDirectory(prefix="palestra-") as folder:
        server = config.server.model_copy(update={"port": 0})
        run_dir = Path(folder) if config.run_dir is None else config.run_dir
        job = config.model_copy(update={"kind": "inference", "server": server, "run_dir": run_dir})  # no trainer
        return run_cancellable(_play(what, tasks, job, concurrency))


async def _play(what: Play, tasks: Sequence[Mapping[str, Any]], config: JobConfig, concurrency: int) -> list[Played]:
    async with local_job(config, lambda kind, data: None) as job, Runner(job.plane.sessions, what) as runner:
        orchestrator: RolloutOrchestrator[int, Trajectory | None] = RolloutOrchestrator(
            lambda number: runner.play_episode(tasks[number]), max_concurrency=concurrency
        )
        producing = asyncio.ensure_future(orchestrator.run_producers_from_stream(range(len(tasks))))
        found = {outcome.work: outcome async for batch in orchestrator.yield_batches(1) for outcome in batch}
        await producing
    return [Outcome(work=task, result=found[n].result, error=found[n].error) for n, task in enumerate(tasks)]
