"""The record of a model call, and its parts: token ids, logprobs, versions and sampling parameters."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from palestra.types.messages import ChatMessage, SamplingOptions

FinishReason = Literal["stop", "length"]


class AgentStepReward(NamedTuple):
    """An agent's reward for an action, possibly of another agent."""

    time_step: int
    agent: str
    reward: float


class StepTimes(NamedTuple):
    """Times of an interaction with the environment, in Unix seconds.

    Attributes:
        acted_at: when the action was given; None: there was none.
    """

    observed_at: float
    acted_at: float | None


class ForkReason(StrEnum):
    """Why a prompt could not reuse the token ids of an earlier call. `MEANINGS` holds the text shown to users."""

    EDITED_MESSAGE = "edited_message"
    PICTURE_CHANGED = "picture_changed"
    REASONING_STRIPPED = "reasoning_stripped"
    WHITESPACE_STRIPPED = "whitespace_stripped"
    TOOL_ARGUMENTS = "tool_arguments"
    TOKENIZATION = "tokenization"
    TEMPLATE = "template"
    TOOLS_CHANGED = "tools_changed"
    TRUNCATED_TURN = "truncated_turn"
    NEW_CONVERSATION = "new_conversation"

    @property
    def is_drift(self) -> bool:
        """Return whether the agent meant to continue an earlier call, so that exact tokens were lost."""
        return self is not ForkReason.NEW_CONVERSATION


# One table, so that the docs, the metrics and the episode view explain a reason in the same words.
MEANINGS = {
    ForkReason.EDITED_MESSAGE: "an earlier message was changed, left out or summarised",
    ForkReason.PICTURE_CHANGED: "an earlier message came back with other pictures, and with the same text",
    ForkReason.REASONING_STRIPPED: "the reasoning of a reply was dropped, by the agent or by the template",
    ForkReason.WHITESPACE_STRIPPED: "a reply came back with other white space around it, and no other change",
    ForkReason.TOOL_ARGUMENTS: "a tool call was written again, with other arguments",
    ForkReason.TOKENIZATION: "the same text, rendered again, has other ids",
    ForkReason.TEMPLATE: "the template writes an earlier message with another text",
    ForkReason.TOOLS_CHANGED: "other tools were offered",
    ForkReason.TRUNCATED_TURN: "a reply was cut at its token limit, and the template can't go on from it",
    ForkReason.NEW_CONVERSATION: "a subagent, another attempt, or a history replaced as a whole; no drift",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """The position where a prompt diverges from an earlier call's exact token ids, and the reason.

    Attributes:
        call: index of the earlier call; None: a separate conversation from the first message on.
        message: index of the first different message.
        position: index of the first different token.
    """

    reason: ForkReason
    call: int | None
    message: int
    position: int


_HAS_NUMPY = find_spec("numpy") is not None
if TYPE_CHECKING or _HAS_NUMPY:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]
    Floats = NDArray[np.float32]
    Mask = NDArray[np.bool_]
else:  # a worker that plays the episodes of a job elsewhere needs no numpy
    Ids = Floats = Mask = Any


def ids_of(values: Iterable[int]) -> Ids:
    """Return token ids, int32; without numpy an `array`."""
    return np.fromiter(values, np.int32) if _HAS_NUMPY else cast(Ids, array("i", values))


def floats_of(values: Iterable[float]) -> Floats:
    """Return numbers, float32; without numpy an `array`."""
    return np.fromiter(values, np.float32) if _HAS_NUMPY else cast(Floats, array("f", values))


class PolicyVersion(NamedTuple):
    """Version of a policy's weights, written as "incarnation.n".

    Attributes:
        incarnation: grows by one when a restart cannot repeat history bit by bit.
        n: grows by one with every published update.
    """

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.n}"

    @property
    def following(self) -> PolicyVersion:
        """Return the version after one more update."""
        return PolicyVersion(self.incarnation, self.n + 1)


FIRST_VERSION = PolicyVersion(0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(SamplingOptions):
    """Sampling parameters of one call. Other attributes are those of `SamplingOptions`.

    Attributes:
        temperature: 0: greedy.
        seed: equal seeds on equal prompts and weights give equal tokens.
        grammar: for the reply, in llguidance's JSON form; "": unconstrained.
    """

    temperature: float
    max_tokens: int
    seed: int
    grammar: str = ""


SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "max_tokens": (1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "min_tokens": (0, 2**31 - 1),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "top_logprobs": (0, 100),
}
"""The least and the largest number of each field of `SamplingParams` that engines can use."""
LARGEST_BIAS = 100.0
MOST_LISTED = 1024  # tokens in `logit_bias`, and in `stop_ids`


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """A part of a reply: consecutive tokens sampled from one version of the policy.

    Attributes:
        logprobs: of each token in the sampling distribution, natural log; at temperature 0 of the softmax.
        top: for each token, (token, logprob) of the most probable ones; (): not requested.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: PolicyVersion
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


class VersionSpan(NamedTuple):
    """A number of consecutive completion tokens from one version of the policy."""

    version: PolicyVersion
    tokens: int


class MediaSpan(NamedTuple):
    """An image in a prompt: `tokens` placeholder ids from position `start`, for the bytes with the SHA-256 `digest`."""

    start: int
    tokens: int
    digest: str


class TokenSequence(NamedTuple):
    """Token ids, and the images for some of them as placeholders.

    Two sequences have a common prefix only if ids and image digests are equal.

    Attributes:
        ids: int32 [N].
        media: in order of their positions; (): all ids are text.
    """

    ids: Ids
    media: tuple[MediaSpan, ...] = ()


class TopTokens(NamedTuple):
    """The K most probable tokens at each of a reply's C positions.

    Attributes:
        ids: int32 [C, K].
        logprobs: float32 [C, K]; -inf: the position has fewer tokens.
    """

    ids: Ids
    logprobs: Floats

    def rows(self) -> list[list[tuple[int, float]]]:
        """Return (token, logprob) of the most probable tokens at each position."""
        pairs = zip(self.ids.tolist(), self.logprobs.tolist(), strict=True)
        return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]


class GrammarSpan(NamedTuple):
    """A reply in a row sampled with a grammar: `tokens` ids from position `start`, from the reply's beginning."""

    start: int
    tokens: int
    grammar: str


# Compared by identity (`eq=False`), because arrays can't be compared with a single truth value. So is `TrainSample`.
@dataclass(kw_only=True, slots=True, eq=False)
class Chat:
    """One call of a model, token by token.

    A session makes it when the prompt is built, and fills in the reply. From then on nothing changes it.

    Only the difference from `parent` is stored, because the prompts of a conversation would otherwise take quadratic
    memory; the properties read the rest through the parents.

    Attributes:
        episode_id: of the episode.
        fence: of the lease under which the call was made.
        index: grows in the order in which the prompts of this lease were made; a failed call leaves a gap.
        time_step: TimeStep of the environment to which the call belongs.
        agent: the agent that made the call.
        policy: the policy that was sampled.
        parent: earlier call with the longest common prefix; None: no common prefix with any.
        shared: number of leading prompt ids that are the parent's prompt and completion; 0 without a parent.
        shared_messages: number of leading messages that are the parent's messages and reply; 0 without a parent.
        new_messages: the other messages, as the agent sent them.
        prompt_tail: int32 [P - shared], the other prompt ids.
        media: images in the tail, by their positions in the whole prompt.
        tools: offered tools, in OpenAI's shape.
        reply: the completion, parsed.
        completion_ids: int32 [C], with the stop token if one was sampled.
        logprobs: float32 [C].
        versions: of the completion's tokens; their lengths add up to C.
        finish_reason: "length": the reply was cut at its token limit.
        fork: where exact tokens of an earlier call were lost; None: the agent did not mean to keep lost tokens.
        stop: stop string that ended the reply; None: a stop token or the limit did.
        top: most probable tokens of the completion's positions; None: not requested, or read for training.
        sampling: how the completion was sampled.
        request_digest: of the request body, to recognise a retry.
        started_at, finished_at: Unix seconds.
    """

    episode_id: str
    fence: int
    index: int
    time_step: int
    agent: str
    policy: str
    parent: Chat | None
    shared: int
    shared_messages: int
    new_messages: tuple[ChatMessage, ...]
    prompt_tail: Ids
    media: tuple[MediaSpan, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    reply: ChatMessage
    completion_ids: Ids
    logprobs: Floats
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    fork: Fork | None = None
    stop: str | None = None
    top: TopTokens | None = None
    sampling: SamplingParams
    request_digest: str
    started_at: float
    finished_at: float

    @property
    def is_raw(self) -> bool:
        """Return whether the prompt was text or token ids instead of messages."""
        return not self.shared_messages and not self.new_messages

    @property
    def prompt_tokens(self) -> int:
        """Return P, the number of prompt tokens, including those of the parents."""
        return self.shared + len(self.prompt_tail)

    @property
    def tokens(self) -> int:
        """Return P + C, the number of tokens of prompt and completion."""
        return self.prompt_tokens + len(self.completion_ids)

    @property
    def extends(self) -> Chat | None:
        """Return the parent if the prompt starts with its whole prompt and completion, else None."""
        return self.parent if self.parent is not None and self.shared == self.parent.tokens else None

    @property
    def prompt_ids(self) -> Ids:
        """Return the ids of the prompt, int32 [P], assembled from this call and its ancestors."""
        return self._leading(self.prompt_tokens)

    @property
    def ids(self) -> Ids:
        """Return the ids of prompt and completion, int32 [P + C], assembled from this call and its ancestors."""
        return self._leading(self.tokens)

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """Return all messages of the prompt, assembled from this call and its ancestors."""
        end = self.shared_messages
        chat: Chat | None = self.parent
        if end == 0:
            return self.new_messages
        pieces: list[tuple[ChatMessage, ...]] = [self.new_messages]
        while chat is not None and end > 0:
            pieces.append((*chat.new_messages, chat.reply)[: max(end - chat.shared_messages, 0)])
            end = min(end, chat.shared_messages)
            chat = chat.parent
        found: list[ChatMessage] = []
        for piece in reversed(pieces):
            found += piece
        return tuple(found)

    @property
    def all_media(self) -> tuple[MediaSpan, ...]:
        """Return the images of the whole prompt, in order; an ancestor's if the prompt shares its ids."""
        spans = (
            span._replace(tokens=min(span.tokens, end - span.start))
            for call, end in self.lineage()
            for span in call.media
            if span.start < end
        )
        return tuple(sorted(spans))  # the lineage begins with this call, whose images come last

    @property
    def sequence(self) -> TokenSequence:
        """Return prompt and completion with their images, [P + C]."""
        return TokenSequence(self.ids, self.all_media)

    def lineage(self) -> Iterator[tuple[Chat, int]]:
        """Yield this call and its ancestors, each with the number of its leading ids that this call starts with."""
        chat, end = self, self.tokens
        while True:
            yield chat, end
            if chat.parent is None:
                return
            chat, end = chat.parent, min(end, chat.shared)

    def _leading(self, length: int) -> Ids:
        """Return the first `length` ids of prompt and completion, int32 [length]."""
        pieces: list[Ids] = []
        for chat, end in self.lineage():
            end = min(end, length)
            # Walking from this call to its oldest ancestor collects the parts from last to first.
            pieces.append(chat.completion_ids[: max(end - chat.prompt_tokens, 0)])
            pieces.append(chat.prompt_tail[: max(end - chat.shared, 0)])
        if not _HAS_NUMPY:
            return ids_of(chain.from_iterable(pieces[::-1]))
        return np.concatenate(pieces[::-1]).astype(np.int32, copy=False)
