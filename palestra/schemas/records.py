"""The records that cross rooms: frozen, keyword-only, every field with its shape, unit and meaning of None.

Letters for ragged axes: P prompt tokens, C completion tokens, N tokens of a row, G samples of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from palestra.schemas.forks import Fork
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

    @property
    def following(self) -> PolicyVersion:
        """The version after one more update."""
        return PolicyVersion(self.incarnation, self.n + 1)


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
    step_times: tuple[StepTimes, ...] | None  # by TimeStep; None where Palestra did not play it itself
    metadata: dict[str, Any]
    worker_id: str | None
    lease_seconds: float

    @property
    def reward(self) -> float | None:
        """The sum of the agents' rewards; None until the episode is completed."""
        return None if self.rewards is None else float(sum(self.rewards.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one call is sampled."""

    temperature: float  # 0: greedy
    max_tokens: int
    seed: int  # of this call; equal seeds on equal prompts and weights give equal tokens
    min_tokens: int = 0  # stop tokens can't be sampled before
    top_p: float = 1.0  # only the most probable tokens that together have this probability; 1: all
    top_k: int = 0  # only so many of the most probable tokens; 0: all
    stop_ids: tuple[int, ...] = ()  # tokens that end the reply, beside the policy's own
    presence_penalty: float = 0.0  # subtracted from the score of a token that the reply has already
    frequency_penalty: float = 0.0  # subtracted as often as the reply has the token
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its score)
    grammar: str = ""  # what the reply has to match, in llguidance's JSON form; empty: anything
    top_logprobs: int = 0  # how many of the most probable tokens to report at each place


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """A piece of a reply: consecutive tokens sampled from one version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the distribution sampled from, natural log; at temperature 0 of the softmax
    version: PolicyVersion
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # for each token (token, logprob) of the most probable; or none


class VersionSpan(NamedTuple):
    """`tokens` consecutive completion tokens of one version."""

    version: PolicyVersion
    tokens: int


class StepTimes(NamedTuple):
    """When an interaction with the environment happened, in Unix seconds."""

    observed_at: float  # when its observation was made
    acted_at: float | None  # when its action was given; None: none was


class MediaSpan(NamedTuple):
    """`tokens` placeholder ids from position `start` of a prompt stand for the bytes with this sha256."""

    start: int
    tokens: int
    digest: str


class TokenSequence(NamedTuple):
    """Token ids, and what stands behind those that are placeholders of images.

    Two sequences are equal up to a position only where both the ids and the digests behind them are.
    """

    ids: Ids  # [N]
    media: tuple[MediaSpan, ...] = ()  # in order of their positions; (): all of it is text


class GrammarSpan(NamedTuple):
    """`tokens` ids from position `start` of a row were sampled so that they match a grammar; they are its beginning."""

    start: int
    tokens: int
    grammar: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chat:
    """One call of a model, token by token. It holds what its parent does not have; the rest is read through it."""

    episode_id: str
    fence: int  # of the lease under which it was made
    index: int  # grows in the order in which the prompts of this lease were made; a call that failed leaves a gap
    time_step: int  # the interaction with the environment that it belongs to
    agent: str
    policy: str
    parent: Chat | None  # the earlier call with which the prompt has most leading ids in common; None: no id
    shared: int  # how many leading prompt ids are the parent's, of its prompt and completion; 0 without a parent
    shared_messages: int  # how many leading messages are the parent's messages and reply; 0 without a parent
    new_messages: tuple[ChatMessage, ...]  # the others, as the agent sent them
    prompt_tail: Ids  # [P - shared], the other prompt ids
    media: tuple[MediaSpan, ...] = ()  # in the tail, by their positions in the whole prompt
    tools: tuple[dict[str, Any], ...] = ()  # what was offered, in OpenAI's shape
    reply: ChatMessage
    completion_ids: Ids  # [C], with the stop token where one was sampled
    logprobs: Floats  # [C]
    versions: tuple[VersionSpan, ...]  # their tokens add up to C
    finish_reason: FinishReason
    fork: Fork | None = None  # None: nothing that the agent meant to keep was lost
    stop: str | None = None  # the stop string that ended it; None: it was a stop token, or the limit
    sampling: SamplingParams
    request_digest: str  # of the request body, to know a retry
    started_at: float  # Unix seconds
    finished_at: float

    @property
    def prompt_tokens(self) -> int:
        """P."""
        return self.shared + len(self.prompt_tail)

    @property
    def tokens(self) -> int:
        """P + C."""
        return self.prompt_tokens + len(self.completion_ids)

    @property
    def extends(self) -> Chat | None:
        """The parent, if the prompt starts with all of it."""
        return self.parent if self.parent is not None and self.shared == self.parent.tokens else None

    @property
    def prompt_ids(self) -> Ids:
        """[P], put together from the ancestors' parts."""
        return self._leading(self.prompt_tokens)

    @property
    def ids(self) -> Ids:
        """[P + C], prompt and completion."""
        return self._leading(self.tokens)

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All messages of the prompt, put together from the ancestors' parts."""
        pieces: list[tuple[ChatMessage, ...]] = [self.new_messages]
        end = self.shared_messages
        chat = self.parent
        while chat is not None and end > 0:
            pieces.append((*chat.new_messages, chat.reply)[: max(end - chat.shared_messages, 0)])
            end = min(end, chat.shared_messages)
            chat = chat.parent
        return tuple(message for piece in reversed(pieces) for message in piece)

    @property
    def all_media(self) -> tuple[MediaSpan, ...]:
        """Images of the whole prompt; those of an ancestor only as far as the prompt shares its ids."""
        return tuple(
            span._replace(tokens=min(span.tokens, end - span.start))
            for call, end in self.lineage()
            for span in call.media
            if span.start < end
        )

    @property
    def sequence(self) -> TokenSequence:
        """Prompt and completion, [P + C]."""
        return TokenSequence(self.ids, self.all_media)

    def lineage(self) -> Iterator[tuple[Chat, int]]:
        """The call and its ancestors, each with the number of its leading ids that this one starts with."""
        chat, end = self, self.tokens
        while True:
            yield chat, end
            if chat.parent is None:
                return
            chat, end = chat.parent, min(end, chat.shared)

    def _leading(self, length: int) -> Ids:
        pieces: list[Ids] = []
        for chat, end in self.lineage():
            end = min(end, length)
            pieces.append(chat.completion_ids[: max(end - chat.prompt_tokens, 0)])
            pieces.append(chat.prompt_tail[: max(end - chat.shared, 0)])
        return np.concatenate(pieces[::-1]).astype(np.int32, copy=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStep:
    """One interaction with the environment: the calls it took, and what the environment answered."""

    index: int
    chats: tuple[Chat, ...]
    reward: float | None  # None: not scored on its own
    observed_at: float  # Unix seconds; of a worker outside, when the first call came
    acted_at: float  # Unix seconds; where no action was given, when the last call returned
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
        return tuple(sorted((chat for step in self.steps for chat in step.chats), key=lambda chat: chat.index))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainSample:
    """One row: a token sequence that the engine saw, with what the loss needs at each position."""

    episode_id: str
    policy: str
    ids: Ids  # [N]
    media: tuple[MediaSpan, ...] = ()  # which of the ids are placeholders, and of what
    loss_mask: Mask  # [N], True where the token was sampled and is trained
    logprobs: Floats  # [N], as recorded at sampling; NaN where not sampled
    versions: NDArray[np.int32]  # [N, 2] (incarnation, n); -1 where not sampled
    calls: NDArray[np.int32]  # [N], index of the call that sampled the token; -1 where not sampled
    advantages: Floats  # [N], 0 where not trained
    loss_weights: Floats  # [N], share in the loss; 0 where not trained
    temperatures: Floats  # [N], at which the token was sampled; 1 where not sampled
    grammars: tuple[GrammarSpan, ...] = ()  # of the calls that had to match one
    old_logprobs: Floats | None = None  # [N], of the policy before the step; None: the algorithm does not need them


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
