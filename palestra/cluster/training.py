"""`palestra.train`: a rollout function, or an environment, and tasks in; a trained model out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.client import AsyncClient, Worker
from palestra.client.protocol import push_calls
from palestra.client.worker import Rollout
from palestra.cluster.console import Console
from palestra.cluster.foreground import Interrupts, run
from palestra.cluster.job_thread import OWN_WORKER, JobThread, TrainResult
from palestra.cluster.run_dir import resolve_run_dir
from palestra.config import JobConfig
from palestra.envs import ConcurrentEnvironment, Environment
from palestra.errors import ConfigError
from palestra.rollout import Play

Tasks = Sequence[Mapping[str, Any]]


def train(
    rollout: Rollout | Play | None = None,
    tasks: Tasks = (),
    config: JobConfig | None = None,
    *,
    validation_tasks: Tasks = (),
    concurrency: int | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a model on what `rollout` plays, in this process, showing progress.

    A rollout function talks to the model server, which listens on a loopback port, as it would to one far away. Agents
    and environments (a `Play`) run beside the server, without HTTP: what they do on the event loop must not block.

    Args:
        rollout: a function `(task, policy)`, sync or async; it gets a task and a `Policy` (base_url, api_key, model for
            any OpenAI client) and returns a reward, rewards by agent, or a `RolloutResult`. An exception gives the
            episode back and is no reward. Or a `Play`: an environment, and who acts in it. None: what
            `config.environment` names.
        tasks: JSON objects; a key `id` names a task. May be empty where the configuration names files, or an
            environment that makes its own.
        config: the job; None for the defaults.
        validation_tasks: held out; scored greedily every `evaluation.every_steps` steps.
        concurrency: episodes played at the same time; None: one step's worth, at most 64.
        resume: go on with the run in the configured folder (or the newest of the job's name).
        quiet: print nothing.

    Raises:
        ConfigError: nothing says what is played, both `rollout` and the configuration do, or an argument is of another
            kind than what it is for.
        InvalidRequest: a task is no JSON object.
        PalestraError: the job failed; the message says why and what to do.
        KeyboardInterrupt: after Ctrl-C. The step that was being trained is finished, the run is saved, and `resume`
            goes on with it. A second Ctrl-C does not wait for that.
        SystemExit: after SIGTERM, with exit code 143; the run is saved in the same way.
    """
    result, interrupts = train_until_stopped(
        rollout,
        tasks,
        config,
        validation_tasks=validation_tasks,
        concurrency=concurrency,
        resume=resume,
        quiet=quiet,
    )
    interrupts.raise_received(
        f"training is {result.state} and saved; go on with resume=True (the run is in {result.run_dir})"
    )
    return result


def train_until_stopped(
    rollout: Rollout | Play | None,
    tasks: Tasks,
    config: JobConfig | None,
    *,
    validation_tasks: Tasks = (),
    concurrency: int | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> tuple[TrainResult, Interrupts]:
    """Train as `train` does, and return where the run stands, and the signal that stopped it, if one did."""
    _check_kinds(config, rollout, {"tasks": tasks, "validation_tasks": validation_tasks})
    tasks, validation_tasks = list(tasks), list(validation_tasks)  # a generator gives its tasks only once
    for _ in push_calls({"validation": validation_tasks, "train": tasks}):
        pass  # what is wrong with a task is said before the model is loaded
    config = _checked(config or JobConfig(), rollout, tasks)
    notes: list[str] = []
    config = resolve_run_dir(config, resume, notes.append)
    environment = config.environment.model_copy(update={"max_concurrency": concurrency} if concurrency else {})
    server_config = config.server.model_copy(update={"port": 0})
    config = config.model_copy(update={"server": server_config, "environment": environment})
    playing = concurrency or min(64, config.rollout.group_size * config.rollout.groups_per_step)
    console = Console(config, quiet=quiet, notes=notes)
    play = rollout if isinstance(rollout, Play) else None
    function = None if isinstance(rollout, Play) else rollout
    server = JobThread(config, console, play)
    with console, Interrupts(server.stop) as interrupts:
        run(play_until_over(server, Rollouts(function, tasks, validation_tasks, playing)))
        result = server.result()
        console.finished(result.state, result.checkpoint)
    return result, interrupts


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What a user gave to `train`."""

    rollout: Rollout | None  # None: the server plays itself
    tasks: Tasks
    validation_tasks: Tasks
    concurrency: int


def _check_kinds(config: object, rollout: object, tasks: Mapping[str, object]) -> None:
    """Refuse arguments that are mistaken for others, before anything is loaded.

    Raises:
        ConfigError: what is wrong, and what to write in its place.
    """
    if config is not None and not isinstance(config, JobConfig):
        raise ConfigError(f"the configuration is a {type(config).__name__}; write palestra.JobConfig(steps=30, …)")
    for name, given in tasks.items():
        if isinstance(given, str | Path):
            key = "tasks.train" if name == "tasks" else "tasks.validation"
            raise ConfigError(f"`{name}` is a list of JSON objects, not {str(given)!r:.80}; a file is named in {key}")
        if isinstance(given, Mapping):
            raise ConfigError(f"`{name}` is a list of JSON objects, not one object; write [{{…}}]")
    if isinstance(rollout, Environment | ConcurrentEnvironment) or (
        isinstance(rollout, type) and issubclass(rollout, Environment | ConcurrentEnvironment)
    ):
        name = rollout.__name__ if isinstance(rollout, type) else type(rollout).__name__
        raise ConfigError(f"{name} is an environment, not a rollout function; give palestra.Play(environment={name})")


def _checked(config: JobConfig, rollout: Rollout | Play | None, tasks: Tasks) -> JobConfig:
    if config.kind != "training":
        raise ConfigError(f"`train` is given a configuration with kind = {config.kind!r}; leave kind out")
    named = config.environment.name
    if rollout is None and named is None:
        raise ConfigError(
            "nothing says what is played: give `train` a rollout function or a `Play`, or set environment.name"
        )
    if rollout is not None and named is not None:
        raise ConfigError(f"`train` is given what to play, and environment.name is {named!r}; leave one of them out")
    if not tasks and named is None and config.tasks.train is None:
        raise ConfigError("the job has no tasks: give `train` some, or name a file in tasks.train")
    return config


async def play_until_over(server: JobThread, user: Rollouts) -> None:
    """Push the tasks and play episodes until the job is over, or has been stopped."""
    job = await server.start()
    try:
        async with AsyncClient(job.url, job.api_key, worker_id=OWN_WORKER) as client:
            if user.tasks:
                await client.push_tasks(user.tasks, user.validation_tasks)
            if user.rollout is None:
                await server.ended.wait()
                return
            playing = asyncio.create_task(Worker(client, user.rollout, user.concurrency).run())
            ended = asyncio.create_task(server.ended.wait())
            await asyncio.wait((playing, ended), return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not playing.done():
                playing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await playing
    finally:
        server.stop()
