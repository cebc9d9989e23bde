"""Makers of records, stores and models that many tests use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from palestra import tokens
from palestra.algorithms.base import StepOrder
from palestra.algorithms.registry import create_algorithm
from palestra.config import AlgorithmConfig, Roles, RolloutConfig
from palestra.engine.base import EngineRequest
from palestra.learner.batch import Batch, make_batch
from palestra.learner.metrics import metric_tables
from palestra.session import PolicyRuntime, PolicySet
from palestra.store import RunStore, open_run_store
from palestra.types.calls import Chat, MediaSpan, PolicyVersion, SamplingParams, TokenSequence, VersionSpan
from palestra.types.messages import ChatMessage, text_message
from palestra.types.records import EpisodeRecord, Task, TimeStep, TrainSample, Trajectory
from palestra.types.states import EpisodeState

SOLE = Roles(default="policy")  # of a job with one policy
TASK = Task(task_id="t", data={"question": "1 + 1"})


class FakeClock:
    """Time that stands until a test moves it; the two clocks are independent."""

    def __init__(self) -> None:
        self.wall = 1_800_000_000.0
        self.ticks = 1000.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.ticks

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.ticks += seconds


def open_store(folder: Path, clock: FakeClock | None = None, **rollout: Any) -> RunStore:
    """A run store in `folder`; NORMAL, because no test pulls the plug."""
    settings = RolloutConfig.model_validate({"lease_seconds": 60.0} | rollout)
    return open_run_store(folder / "run.db", settings, clock, synchronous="NORMAL")


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def engine_request(
    prompt_ids: np.ndarray, sampling: SamplingParams, policy: str = "policy", media: tuple[MediaSpan, ...] = ()
) -> EngineRequest:
    return EngineRequest(policy=policy, prompt=TokenSequence(prompt_ids, media), sampling=sampling)


def make_chat(
    episode_id: str = "train-000000-00",
    fence: int = 1,
    index: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    completion: Sequence[int] = (4, 5),
    messages: tuple[ChatMessage, ...] | None = None,
    reply: str = "reply",
    parent: Chat | None = None,
    **changes: Any,
) -> Chat:
    """One call; with `parent` its prompt is the parent's tokens followed by `prompt`."""
    logprobs, max_tokens = changes.pop("logprobs", None), changes.pop("max_tokens", 16)
    own = np.array(prompt, np.int32)
    messages = (text_message("user", "hello"),) if messages is None else messages
    shared = 0 if parent is None else parent.tokens
    shared_messages = 0 if parent is None else len(parent.messages) + 1
    chat = Chat(
        episode_id=episode_id,
        fence=fence,
        index=index,
        time_step=index,
        agent="agent",
        policy="policy",
        parent=parent,
        shared=shared,
        shared_messages=shared_messages,
        new_messages=messages,
        prompt_tail=own,
        reply=text_message("assistant", reply),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.array(logprobs if logprobs is not None else [-0.5] * len(completion), np.float32),
        versions=(VersionSpan(PolicyVersion(0, 0), len(completion)),),
        finish_reason="stop",
        sampling=SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=7),
        request_digest=f"digest-{index}",
        started_at=1.0,
        finished_at=2.0,
    )
    return replace(chat, **changes)


def one_policy(runtime: PolicyRuntime) -> PolicySet:
    """The policies of a job that has one."""
    return PolicySet(runtimes={runtime.name: runtime}, roles=Roles(default=runtime.name))


def rows_of(chats: Iterable[Chat], trained: Collection[int] | None = None) -> list[TrainSample]:
    """The rows of an episode's calls."""
    return tokens.rows_of(tokens.TokenTrie(chats), trained)


def make_episode(group: int = 0, sample: int = 0, reward: float | None = 1.0, **changes: Any) -> EpisodeRecord:
    episode = EpisodeRecord(
        episode_id=f"train-{group:06d}-{sample:02d}",
        kind="train",
        group_index=group,
        sample_index=sample,
        task=TASK,
        state=EpisodeState.COMPLETED,
        fence=1,
        attempts=1,
        rewards=None if reward is None else {"agent": reward},
        step_rewards=None,
        step_times=None,
        metadata={},
        worker_id="w",
        lease_seconds=60.0,
    )
    return replace(episode, **changes)


def make_trajectory(group: int, sample: int, reward: float, chats: Sequence[Chat]) -> Trajectory:
    steps = tuple(
        TimeStep(index=i, chats=(chat,), reward=None, observed_at=0.0, acted_at=0.0, terminated=False, truncated=False)
        for i, chat in enumerate(chats)
    )
    return Trajectory(episode=make_episode(group, sample, reward), steps=steps)


def make_sample(
    row: Sequence[int],
    trained: Sequence[int],
    advantage: float = 1.0,
    weight: float = 1.0,
    logprobs: float | Sequence[float] = -1.0,
    temperature: float = 1.0,
    name: str = "e",
) -> TrainSample:
    """A row whose positions `trained` are sampled tokens."""
    n = len(row)
    mask = np.zeros(n, np.bool_)
    mask[list(trained)] = True
    sampling_logprobs = np.full(n, np.nan, np.float32)
    sampling_logprobs[mask] = logprobs
    versions = np.full((n, 2), -1, np.int32)
    versions[mask] = 0
    return TrainSample(
        episode_id=name,
        policy="policy",
        ids=np.array(row, np.int32),
        loss_mask=mask,
        logprobs=sampling_logprobs,
        versions=versions,
        calls=np.where(mask, np.int32(0), np.int32(-1)),
        advantages=mask.astype(np.float32) * np.float32(advantage),
        loss_weights=mask.astype(np.float32) * np.float32(weight),
        temperatures=np.where(mask, np.float32(temperature), np.float32(1.0)),
    )


def make_train_batch(
    trajectories: Sequence[Trajectory],
    config: AlgorithmConfig,
    max_tokens: int,
    version: PolicyVersion,
    order: StepOrder = "observed",
    roles: Roles = SOLE,
) -> Batch:
    """What a step trains on, with the advantages of the configured algorithm, which needs no forward pass."""
    algorithm = create_algorithm(config, order)
    batch = make_batch(trajectories, algorithm, max_tokens, version, "policy", roles)
    return batch.with_advantages(algorithm.advantages(batch.groups, {}), {})


def metric_names() -> set[str]:
    """Every name that may stand in a row of metrics.jsonl."""
    return {metric.name for metrics in metric_tables().values() for metric in metrics}
