"""The records that cross rooms: frozen, keyword-only, every field with its shape, unit and meaning of None.

Letters for ragged axes: P prompt tokens, C completion tokens, N tokens of a row, G samples of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from palestra.schemas.messages import ChatMessage
from palestra.schemas.states import EpisodeState

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
FinishReason = Literal["stop", "length"]
EpisodeKind = Literal["train", "validation", "adhoc"]


class PolicyVersion(NamedTuple):
    """`n` grows by one with every published update; `incarnation` when a restart can't repeat history bit by bit."""

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.n}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One input. `data` is any JSON object; the server hands it to whoever claims an episode of it."""

    task_id: str
    data: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One attempt at a task, as the store has it."""

    episode_id: str
    kind: EpisodeKind
    group_index: int  # position of its group in the canonical order of its kind
    sample_index: int  # 0 <= sample_index < group_size
    task: Task
    state: EpisodeState
    fence: int  # grows with every claim; 0 before the first
    attempts: int  # claims used so far
    rewards: dict[str, float] | None  # by agent; None until it is completed
    step_rewards: tuple[float, ...] | None  # by TimeStep; None when the reward is for the whole episode
    metadata: dict[str, Any]
    worker_id: str | None
    lease_seconds: float

    @property
    def reward(self) -> float | None:
        """The sum of the agents' rewards; None until the episode is completed."""
        return None if self.rewards is None else float(sum(self.rewards.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """An episode that now belongs to one worker, until its lease runs out."""

    episode: Episode
    policy: str
    version: PolicyVersion  # what it is sampled from when it starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one call is sampled."""

    temperature: float  # 0: greedy
    max_tokens: int
    seed: int  # of this call; equal seeds on equal prompts and weights give equal tokens
    min_tokens: int = 0  # stop tokens can't be sampled before


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """A piece of a reply: consecutive tokens sampled from one version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the distribution sampled from, natural log; at temperature 0 of the softmax
    version: PolicyVersion


class VersionSpan(NamedTuple):
    """`tokens` consecutive completion tokens of one version."""

    version: PolicyVersion
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chat:
    """One call of a model, token by token."""

    episode_id: str
    fence: int  # of the lease under which it was made
    index: int  # 0, 1, … in the order in which the calls of this lease arrived
    time_step: int  # the interaction with the environment that it belongs to
    agent: str
    policy: str
    messages: tuple[ChatMessage, ...]  # as the agent sent them
    reply: ChatMessage
    prompt_ids: Ids  # [P]
    completion_ids: Ids  # [C], with the stop token where one was sampled
    logprobs: Floats  # [C]
    versions: tuple[VersionSpan, ...]  # their tokens add up to C
    finish_reason: FinishReason
    parent: int | None  # index of the earlier call whose exact ids the prompt starts with; None: rendered afresh
    shared: int  # how many leading prompt ids are the parent's prompt and completion; 0 without a parent
    shared_messages: int  # how many leading messages are the parent's messages and reply; 0 without a parent
    sampling: Sampling
    request_digest: str  # of the request body, to know a retry
    started_at: float  # Unix seconds
    finished_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStep:
    """One interaction with the environment: the calls it took, and what the environment answered."""

    index: int
    chats: tuple[Chat, ...]
    reward: float | None  # None: not scored on its own
    terminated: bool
    truncated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """All that happened in one episode."""

    episode: Episode
    steps: tuple[TimeStep, ...]

    @property
    def chats(self) -> tuple[Chat, ...]:
        """Every call, in order of arrival."""
        return tuple(chat for step in self.steps for chat in step.chats)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainSample:
    """One row: a token sequence that the engine saw, with what the loss needs at each position."""

    episode_id: str
    policy: str
    ids: Ids  # [N]
    loss_mask: Mask  # [N], True where the token was sampled and is trained
    logprobs: Floats  # [N], behaviour; NaN where not sampled
    versions: NDArray[np.int32]  # [N, 2] (incarnation, n); -1 where not sampled
    advantages: Floats  # [N], 0 where not trained
    weights: Floats  # [N], share in the loss; 0 where not trained
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchManifest:
    """What step `step` trains on; committed before it does."""

    step: int
    version: PolicyVersion  # the policy before the step
    episode_ids: tuple[str, ...]  # in canonical order: (group index, sample index)
    seed: int
    config_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened in a job. Ids grow without gaps being promised."""

    event_id: int
    at: float  # Unix seconds
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
