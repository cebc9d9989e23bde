"""A short run of a job, from which memory, tokens and seconds of a whole step on this machine are estimated.

The trial is the job itself, in a folder that is removed afterwards: its model, its environment, the engine, the trainer
with real gradients, two steps. Three things are smaller where the job is large: groups of a step (as many as keep the
engine's batch full), tokens of a reply, and the time. What the estimate assumes is said with it.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from palestra.config import JobConfig, SeatsConfig, UpdatesConfig
from palestra.disk import in_new_folder
from palestra.errors import EngineFailure, ModelError, WorkerCrashLoop
from palestra.runtime.checking import existing_parent
from palestra.runtime.checkpoints import newest_checkpoints
from palestra.runtime.event_loop import run_on_uvloop
from palestra.runtime.local import local_job
from palestra.runtime.memory import MemoryPeak
from palestra.runtime.tasks import task_of
from palestra.runtime.trial_play import (
    STAND_IN_WORDS,
    conversation_words,
    has_stand_in,
    plays_episodes,
    stand_in_task,
    teaching_share_of,
    trial_play,
)
from palestra.store.browsing import browse, list_episodes
from palestra.store.calls import read_trajectory
from palestra.types.metrics import row_of_policy

T = TypeVar("T")
STEPS = 2  # the first step makes the optimizer's moments and warms up; the second one is measured
REPLY_TOKENS = 64  # of a reply in the trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a step of the job takes on this machine.

    Attributes:
        memory_bytes: most memory of the process, and of those that it starts.
        gpu_bytes: most memory of the GPU; 0 where none is used.
        episodes: of a step.
        calls: model calls of a step.
        prompt_tokens: of all calls of a step.
        completion_tokens: sampled tokens of a step.
        rollout_seconds: playing the episodes of a step.
        train_seconds: forward, backward, optimizer, for the share of groups that teach.
        most_train_seconds: the same where every group teaches.
        step_seconds: the whole step, without evaluations, for the share of groups that teach.
        most_step_seconds: the same where every group teaches.
        checkpoint_bytes: of one checkpoint, on disk.
        load_seconds: from the start until the data plane listens.
        trial_seconds: how long the trial took.
        truncated_share: share of the trial's replies that reached the limit of tokens.
        teaching_share: share of the trial's groups with rewards that differ; the others have no gradient, unless a
            penalty or a bonus in the loss gives them one.
        silent_share: share of the trial's episodes in which the policy that is trained was not called.
        assumptions: what the numbers rest on, in sentences.
    """

    memory_bytes: int
    gpu_bytes: int
    episodes: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    rollout_seconds: float
    train_seconds: float
    most_train_seconds: float
    step_seconds: float
    most_step_seconds: float
    checkpoint_bytes: int
    load_seconds: float
    trial_seconds: float
    truncated_share: float
    teaching_share: float
    silent_share: float
    assumptions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was seen of a trial.

    Attributes:
        row: metrics of the last step.
        calls: model calls of all steps.
        episodes: episodes of all steps.
        teaching_share: share of the groups whose episodes got different rewards from the environment.
        idle_bytes: resident memory when the models were loaded.
        peak_bytes: most resident memory.
        others_bytes: most memory of the processes that the job has started, such as engine servers.
        gpu_bytes: most memory of the GPU.
        load_seconds: until the data plane listened.
        checkpoint_bytes: of the checkpoint that the trial wrote.
    """

    row: Mapping[str, float]
    calls: int
    episodes: int
    teaching_share: float
    idle_bytes: int
    peak_bytes: int
    others_bytes: int = 0
    gpu_bytes: int
    load_seconds: float
    checkpoint_bytes: int


def estimate_step(config: JobConfig, report: Callable[[str], None], limit_seconds: float) -> Estimate:
    """Run two short steps of a training job, and say what a whole step takes.

    Args:
        config: the job, which has passed `check_job`.
        report: is given a line when the trial gets further.
        limit_seconds: after which the trial is given up.

    Returns:
        The estimate, with what it assumes.

    Raises:
        PalestraError: the job can't run; the message says why.
        TimeoutError: two steps took longer than the limit.
    """
    began = time.monotonic()

    def work(folder: Path) -> tuple[JobConfig, Measured]:
        trial = trial_config(config, folder / "run")
        return trial, run_on_uvloop(_run(trial, config, report, limit_seconds))

    trial, measured = _in_trial_folder(config, work)
    return extrapolate(config, trial, measured, time.monotonic() - began)


def load_model(config: JobConfig, report: Callable[[str], None]) -> None:
    """Open a job that only serves its model, and close it.

    Args:
        config: the job, which has passed `check_job`.
        report: is given a line before the model is loaded.

    Raises:
        PalestraError: the model can't be loaded, or served with this configuration.
    """

    async def opened(trial: JobConfig) -> None:
        async with local_job(trial, lambda kind, data: None):
            pass

    def work(folder: Path) -> None:
        server = config.server.model_copy(update={"host": "127.0.0.1", "port": 0})
        run_on_uvloop(opened(config.model_copy(update={"run_dir": folder / "run", "server": server})))

    report("loading the model")
    _in_trial_folder(config, work)


def _in_trial_folder(config: JobConfig, work: Callable[[Path], T]) -> T:
    """Return what `work` returns for a new folder, which is removed afterwards."""

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


def trial_config(config: JobConfig, folder: Path) -> JobConfig:
    """Return the job that is run as the trial.

    Args:
        folder: the trial's run folder, which does not exist yet.
    """
    at_once = getattr(config.engine, "max_batch", config.rollout.group_size)
    groups = min(config.rollout.groups_per_step, math.ceil(at_once / config.rollout.group_size))
    policies = {}
    for name, policy in config.policies.items():
        tokens = min(policy.sampling.max_tokens, REPLY_TOKENS)
        short: dict[str, Any] = {"sampling": policy.sampling.model_copy(update={"max_tokens": tokens})}
        if not policy.frozen:
            short["updates"] = UpdatesConfig()  # the step that is measured is one in which all are updated
        policies[name] = policy.model_copy(update=short)
    return config.model_copy(
        update={
            "name": "check",
            "steps": STEPS,
            "token_budget": None,
            "run_dir": folder,
            "policies": policies,
            "seats": SeatsConfig(),  # no worker comes to a trial: the policies play all agents
            "rollout": config.rollout.model_copy(update={"groups_per_step": groups}),
            "evaluation": config.evaluation.model_copy(update={"every_steps": 0, "every_tokens": None}),
            "checkpoint": config.checkpoint.model_copy(update={"every_steps": STEPS}),
            "server": config.server.model_copy(update={"host": "127.0.0.1", "port": 0}),
        }
    )


def extrapolate(config: JobConfig, trial: JobConfig, seen: Measured, trial_seconds: float) -> Estimate:
    """Return what a step of the job takes, from what a step of the trial took."""
    row, larger = seen.row, config.rollout.groups_per_step / trial.rollout.groups_per_step
    calls = seen.calls / max(seen.episodes, 1) * row["train/episodes"]
    short, full = _reply_limit(trial), _reply_limit(config)
    plays = plays_episodes(config)
    cut = row["rollout/truncated_share"] * calls if full > short and plays else 0.0
    sampled, prompt = row["rollout/completion_tokens"], row["rollout/prompt_tokens"]
    longer = (sampled + cut * (full - short)) / max(sampled, 1)
    distinct = (prompt - row["rollout/reused_tokens"] + sampled) * (1 - row.get("train/merged_share", 0.0))
    rows_longer = (distinct + sampled * (longer - 1)) / max(distinct, 1)
    rollout = row["time/rollout_seconds"] * larger * longer
    most = row["time/train_seconds"] * larger * rows_longer
    train = most * _trained_share(config, seen.teaching_share)
    rest = row["time/step_seconds"] - row["time/rollout_seconds"] - row["time/train_seconds"]
    others = rollout + max(rest, 0.0)
    # Activations grow with the tokens of a micro-batch; one row that is longer than a micro-batch has one of its own.
    call_tokens = (prompt + sampled) / max(calls, 1)
    long_row = call_tokens * longer / max(config.trainer.micro_batch_tokens or 1024, call_tokens)
    peak = seen.idle_bytes + (seen.peak_bytes - seen.idle_bytes) * max(1.0, long_row)
    return Estimate(
        memory_bytes=int(peak) + seen.others_bytes,
        gpu_bytes=seen.gpu_bytes,
        episodes=(config.rollout.group_size if plays else 1) * config.rollout.groups_per_step,
        calls=round(calls * larger),
        prompt_tokens=round(prompt * larger),
        completion_tokens=round(sampled * larger * longer),
        rollout_seconds=rollout,
        train_seconds=train,
        most_train_seconds=most,
        step_seconds=others + train,
        most_step_seconds=others + most,
        checkpoint_bytes=seen.checkpoint_bytes,
        load_seconds=seen.load_seconds,
        trial_seconds=trial_seconds,
        truncated_share=row["rollout/truncated_share"],
        teaching_share=seen.teaching_share,
        silent_share=row["train/episodes_without_tokens"] / max(row["train/episodes"], 1.0),
        assumptions=tuple(_assumptions(config, trial, seen)),
    )


def _assumptions(config: JobConfig, trial: JobConfig, seen: Measured) -> Iterator[str]:
    """Say what the numbers of an estimate rest on."""
    yield f"measured in step {STEPS} of a trial with the model as it is now; evaluations are left out"
    if any(policy.updates.every > 1 for policy in config.policies.values()):
        yield "all policies that are trained are updated in this step; in others it may be some of them"
    if _trained_share(config, seen.teaching_share) < 1:
        yield (
            f"{seen.teaching_share:.0%} of the groups had different rewards, and only those are trained: the shorter "
            "times are for as many, the longer ones for a step in which all groups are"
        )
    elif seen.teaching_share < 1:
        yield (
            f"{seen.teaching_share:.0%} of the groups had different rewards; a penalty or a bonus trains the others as "
            "well"
        )
    groups, trial_groups = config.rollout.groups_per_step, trial.rollout.groups_per_step
    if groups > trial_groups:
        what = "groups were played" if plays_episodes(config) else "episodes were trained"
        yield f"{trial_groups} of {groups} {what}; time grows with their number"
    if not plays_episodes(config):
        if has_stand_in(config):
            words = conversation_words(config)
            yield f"your conversations come later: one is taken to have {words} words, half of them learned"
        return
    if _reply_limit(config) > _reply_limit(trial):
        share = seen.row["rollout/truncated_share"]
        others = "; replies of frozen policies are taken as they were" if len(config.policies) > 1 else ""
        yield (
            f"replies were cut at {_reply_limit(trial)} tokens; the {share:.0%} that reached it are taken to have all "
            f"{_reply_limit(config)} of max_tokens{others}"
        )
    if config.environment.name is None and config.environment.url is None:
        what = "the task as JSON" if config.tasks.train is not None else f"{STAND_IN_WORDS} words"
        yield f"your agent plays outside: an episode is taken to be one call, whose prompt is {what}"


def _trained_share(config: JobConfig, teaching_share: float) -> float:
    """Return the share of the rows that are trained: of policies with a penalty or a bonus in the loss, all."""
    algorithms = [config.algorithm_of(name) for name in config.trained_policies]
    return sum(1.0 if each.trains_equal_rewards else teaching_share for each in algorithms) / len(algorithms)


def _reply_limit(config: JobConfig) -> int:
    """Return the most tokens of a reply of the trained policy, of whose calls `truncated_share` is a share."""
    return config.policies[config.players.default].sampling.max_tokens


async def _run(trial: JobConfig, config: JobConfig, report: Callable[[str], None], limit_seconds: float) -> Measured:
    """Run the trial in this process, and measure it."""
    rows: list[dict[str, float]] = []

    def heard(kind: str, data: dict[str, Any]) -> None:
        if kind == "step" and data["step"]:
            rows.append(data)
            report(f"step {len(rows)} of {STEPS} took {data['time/step_seconds']:.1f} s")

    report("loading the model")
    began = time.monotonic()
    with MemoryPeak() as memory:
        async with asyncio.timeout(limit_seconds), local_job(trial, heard, trial_play(config)) as job:
            loaded, idle = time.monotonic() - began, memory.now()
            if has_stand_in(config):
                await job.plane.store.tasks.push("train", [task_of(stand_in_task(config))], "check")
                await job.plane.store.tasks.seal()
            report("playing and training" if plays_episodes(config) else "training")
            await job.run()
    assert trial.run_dir is not None
    with browse(trial.run_dir / "run.db") as connection:
        played = list_episodes(connection, "train", "completed", 10**6)
        # Of a job whose agents play outside, the rewards are those of the stand-in.
        known = config.environment.name is not None or config.environment.url is not None
        teaching = (
            teaching_share_of((read_trajectory(connection, each.episode_id) for each in played), config)
            if known
            else 1.0
        )
    checkpoints = newest_checkpoints(trial).values()
    return Measured(
        row=_of_all_policies(rows[-1], config.players.rivals),
        calls=sum(episode.calls for episode in played),
        episodes=len(played),
        teaching_share=teaching,
        idle_bytes=idle,
        peak_bytes=memory.peak,
        others_bytes=memory.others,
        gpu_bytes=_gpu_peak(),
        load_seconds=loaded,
        checkpoint_bytes=sum(
            file.stat().st_size for newest in checkpoints for file in newest.rglob("*") if file.is_file()
        ),
    )


def _of_all_policies(row: Mapping[str, float], rivals: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a step under the names that they have where one policy is trained."""
    if not rivals:
        return dict(row)
    own = [row_of_policy(row, policy, rivals) for policy in rivals]
    shares = ("rollout/truncated_share", "train/merged_share")
    counts = ("train/episodes", "train/episodes_without_tokens")
    found = {name: sum(each.get(name, 0.0) for each in own) / len(own) for name in shares}
    found |= {name: max(each[name] for each in own) for name in counts}
    return {**row, **found}


def _gpu_peak() -> int:
    """Return the most memory that torch has held on a GPU; 0 where it was not used."""
    import sys

    torch = sys.modules.get("torch")
    return int(torch.cuda.max_memory_allocated()) if torch is not None and torch.cuda.is_available() else 0
