"""Two real steps of a job, in a temporary folder, which `palestra check` measures.

The trial is the job itself: its model, its environment or the user's own function, its groups and its longest replies.
Only the learning rate is changed, to one that changes no weight, so that both steps sample from the same model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import orjson
from sqlalchemy import func, select

from palestra.algorithms.registry import create_algorithm
from palestra.client.async_client import AsyncClient
from palestra.client.worker import Rollout, Worker
from palestra.config import JobConfig, SeatsConfig, UpdatesConfig
from palestra.disk import in_new_folder
from palestra.envs import Environment
from palestra.errors import EngineFailure, ModelError, StoreError, WorkerCrashLoop
from palestra.http.server import run_on_uvloop
from palestra.process.keeper import descendants_of
from palestra.rollout import RolloutSpec
from palestra.runtime.local import local_job
from palestra.runtime.local_job import LocalJob
from palestra.runtime.starting_points import newest_checkpoints
from palestra.runtime.tasks import task_of
from palestra.store.browsing import browse, list_episodes
from palestra.store.spending import Used, sums, sums_by_episode, usage_of_calls
from palestra.store.tables import chats, tasks
from palestra.threads import in_thread
from palestra.types.metrics import row_of_policy
from palestra.waiting import race
from palestra_inspect.checking import existing_parent


def peak_bytes() -> int:
    """Return the most bytes that this process has held, and those that its descendants hold now, such as engine
    servers, each with its share of shared memory.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return own + sum(map(_share, descendants_of(os.getpid())))


def _share(process: int) -> int:
    """Return the bytes of a process, with its share of the memory that it has in common with others."""
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


T = TypeVar("T")
STEPS = 2  # the first step makes the optimizer's moments and warms up
NO_LEARNING = 5e-324  # the configuration wants a number above 0; in float32, in which weights change, this is 0
CLOSE_SECONDS = 5.0  # what an unfinished trial may take to end; then it is left behind
WORDS = 200  # of a prompt where nothing says what prompts are like


@dataclass(kw_only=True, slots=True)
class Trial:
    """Measurements of the job's first steps, even if time ran out before they ended.

    Attributes:
        episodes, calls, completion_tokens: of all steps, including an unfinished one.
        memory_bytes: peak memory of this process, with that of its children after a step.
        gpu_bytes: peak GPU memory; 0 without a GPU.
        checkpoint_bytes: of one checkpoint; 0: none was written.
        stopped: whether it was ended before both steps were finished.
        used: what the calls have used, by episode.
        held_out: validation tasks of the job.
        stand_in: whether one question replaced the episodes of an external agent.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    episodes: int = 0
    calls: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0
    gpu_bytes: int = 0
    checkpoint_bytes: int = 0
    used: list[Used] = field(default_factory=list)
    held_out: int = 0
    stopped: bool = False
    stand_in: bool = False


def plays_episodes(config: JobConfig) -> bool:
    """Return whether training episodes are played; otherwise recorded ones are trained on."""
    return all(create_algorithm(config.algorithm_of(name)).recorded is None for name in config.trained_policies)


def try_steps(
    config: JobConfig,
    report: Callable[[str], None],
    limit_seconds: float,
    rollout: Rollout | None = None,
    end: SimpleQueue[None] | None = None,
) -> Trial:
    """Run two steps of a training job and return measurements; one that only serves its model is opened and closed.

    Args:
        report: called with a line on progress, in another thread.
        limit_seconds: timeout; returns what was measured until then, a few seconds later at most.
        rollout: the user's function that plays the episodes; None: the job's environment, or a question that replaces
            an external agent.
        end: an item in it has the effect of the timeout.
    """

    def work(folder: Path) -> Trial:
        trial_config = _trial_config(config, folder / "run")
        trains = config.kind == "training"
        trial = Trial(stand_in=trains and rollout is None and plays_episodes(config) and _plays_outside(config))
        began = time.monotonic()
        report("loading the model")
        run = _OwnThread(lambda: _run(trial_config, trial, report, rollout), end)
        trial.stopped = not run.wait(limit_seconds)
        trial.memory_bytes, trial.gpu_bytes = max(trial.memory_bytes, peak_bytes()), _gpu_peak()
        if trial.stopped:
            # Before the job gives back the episodes that are being played, whose calls are dropped then.
            with contextlib.suppress(StoreError):  # its store is not made yet
                _count(trial, trial_config)
            run.cancel()
        trial.seconds = time.monotonic() - began
        newest = newest_checkpoints(trial_config).values()
        files = (file for one in newest for file in one.rglob("*") if file.is_file())
        trial.checkpoint_bytes = sum(file.stat().st_size for file in files)
        return trial

    return _in_trial_folder(config, work)


class _OwnThread:
    """Work on the event loop of a thread of its own: whatever blocks there, time is kept here."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], end: SimpleQueue[None] | None) -> None:
        """Begin the work. `end`: an item in it ends the waiting for the work."""
        self._work, self._end, self._ended = work, SimpleQueue[None]() if end is None else end, False
        self._failure: BaseException | None = None
        self._cancel: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._main, name="palestra-trial", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether the work has ended within a time; raise its error."""
        with contextlib.suppress(Empty):
            self._end.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        if self._ended and self._failure is not None:
            raise self._failure
        return self._ended

    def cancel(self) -> None:
        """Cancel the work; it is left behind if it has not ended after `CLOSE_SECONDS`."""
        if self._cancel is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended meanwhile
                self._cancel()
        self._thread.join(CLOSE_SECONDS)

    def _main(self) -> None:
        try:
            run_on_uvloop(self._run())
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._failure = error
        self._ended = True
        self._end.put(None)

    async def _run(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        await self._work()


def _in_trial_folder(config: JobConfig, work: Callable[[Path], T]) -> T:
    """Return what `work` returns for a temporary folder; a log that an error names is kept."""

    def keeping_logs(folder: Path) -> T:
        try:
            return work(folder)
        except (EngineFailure, ModelError, WorkerCrashLoop) as error:
            run = folder.absolute() / "run"
            logs = [log for log in run.glob("engine-*.log") if str(log) in str(error)]
            if not logs:
                raise
            kept = tempfile.mkdtemp(prefix="palestra-check-")
            for log in logs:
                shutil.copy(log, kept)
            raise type(error)(str(error).replace(str(run), kept)) from error

    return in_new_folder(existing_parent(config.folder), ".palestra-check-", keeping_logs)


def _trial_config(config: JobConfig, folder: Path) -> JobConfig:
    policies = {}
    for name, policy in config.policies.items():
        fixed = policy.optimizer.model_copy(update={"learning_rate": NO_LEARNING})
        updates = {} if policy.frozen else {"updates": UpdatesConfig(), "optimizer": fixed}
        policies[name] = policy.model_copy(update=updates)
    return config.model_copy(
        update={
            "name": "check",
            "run_dir": folder,
            "steps": STEPS,
            "token_budget": None,
            "budget": None,
            "tracking": [],
            "seats": SeatsConfig(),  # no worker comes to a trial
            "policies": policies,
            "evaluation": config.evaluation.model_copy(update={"every_steps": 0, "every_tokens": None}),
            "checkpoint": config.checkpoint.model_copy(update={"every_steps": STEPS}),
            "server": config.server.model_copy(update={"host": "127.0.0.1", "port": 0}),
        }
    )


async def _run(config: JobConfig, trial: Trial, report: Callable[[str], None], rollout: Rollout | None) -> None:
    """Run the trial, and note its steps."""

    def heard(kind: str, data: dict[str, Any]) -> None:
        if kind == "step" and data["step"]:
            trial.rows.append(_of_all_policies(data, config.players.rivals))
            trial.memory_bytes = max(trial.memory_bytes, peak_bytes())  # while its processes are there
            report(f"step {len(trial.rows)} of {STEPS} took {data['time/step_seconds']:.1f} s")

    play = RolloutSpec(environment=_StandIn) if trial.stand_in else None
    async with local_job(config, heard, play) as job:
        if config.kind == "inference":
            return
        if not (config.environments or config.tasks.train or config.environment.name or config.brings_tasks):
            await job.plane.store.tasks.push("train", [task_of(_stand_in_task(config))], "check")
            await job.plane.store.tasks.seal()
        report("playing and training" if plays_episodes(config) else "training")
        await _until_over(job, rollout, min(64, config.rollout.group_size * config.rollout.groups_per_step))
        _count(trial, config)


def _count(trial: Trial, config: JobConfig) -> None:
    """Count the episodes that ended, and the calls and tokens of all."""
    with browse(config.folder / "run.db") as connection:
        trial.episodes = len(list_episodes(connection, "train", "completed", 10**6))
        trial.used = sums_by_episode(connection) + _outside(sums(connection))
        trial.used = trial.used or list(usage_of_calls(connection, config))
        held_out = select(func.count()).select_from(tasks).where(tasks.c.split.startswith("validation"))
        trial.held_out = connection.execute(held_out).scalar_one()
        sampled = [orjson.loads(versions) for versions in connection.scalars(select(chats.c.versions))]
    trial.calls = len(sampled)
    trial.completion_tokens = sum(tokens for spans in sampled for *_, tokens in spans)


def _outside(found: list[Used]) -> list[Used]:
    """Return the sums of calls that are of no episode."""
    return [one for one in found if one.kind in ("judge", "audit", "teacher")]


async def _until_over(job: LocalJob, rollout: Rollout | None, concurrency: int) -> None:
    """Run the job, with the user's function in its own thread, where blocking code is harmless."""
    if rollout is None:
        await job.run()
        return

    async def play() -> None:
        async with AsyncClient(job.url, job.api_key, worker_id="palestra-check") as client:
            await Worker(client, rollout, concurrency).run()

    async def playing() -> None:
        await in_thread(lambda: asyncio.run(play()), "palestra-check")
        await asyncio.Event().wait()  # the job's own end is that of the trial

    await race(job.run(), playing())


def _plays_outside(config: JobConfig) -> bool:
    jobs = config.each_environment.values()
    return config.harness is None and all(job.environment.name is None and job.environment.url is None for job in jobs)


def _stand_in_task(config: JobConfig) -> dict[str, Any]:
    """Return a task that replaces later ones: a question, or a conversation, that fits the context."""
    # A word has one token to five.
    words = min(WORDS, config.policies[config.players.default].max_context // 10)
    if plays_episodes(config):
        return {"prompt": "word " * words}
    half = "word " * (words // 2)
    return {"messages": [{"role": "user", "content": half}, {"role": "assistant", "content": half}]}


class _StandIn(Environment):
    """One question, which is the task itself, and any answer; half of the answers earn a reward."""

    blocking = False

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Show the prompt of the task, or the task as JSON."""
        prompt = task.get("prompt")
        return (prompt if isinstance(prompt, str) else json.dumps(dict(task))), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode."""
        return "", float(sum(action.encode()) % 2), True, False, {}


def _of_all_policies(row: Mapping[str, float], rivals: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a step under the names of a job with one policy: of several, shares are averaged."""
    if not rivals:
        return dict(row)
    own = [row_of_policy(row, policy, rivals) for policy in rivals]
    shares = ("rollout/truncated_share", "train/groups_zero_variance")
    counts = ("train/episodes", "train/episodes_without_tokens")
    found = {name: sum(each.get(name, 0.0) for each in own) / len(own) for name in shares}
    return {**row, **found, **{name: max(each[name] for each in own) for name in counts}}


def _gpu_peak() -> int:
    """Return the most memory that torch has held on a GPU; 0 where it was not used."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.max_memory_allocated()) if torch is not None and torch.cuda.is_available() else 0
