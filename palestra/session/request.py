"""The request of an agent for a reply, and the interface of a listener that follows its sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from palestra.chat import MessageDelta
from palestra.schemas.messages import ChatMessage, ToolChoice
from palestra.schemas.records import Chat, Ids, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One request for samples: messages, or a prompt that is used unchanged, and how to sample.

    A dialect makes it from the body of a request. Values that the job fixes are applied later (`sampling_of`).

    Attributes:
        policy: name of the policy.
        messages: the conversation; () with `prompt`.
        prompt: text or token ids in place of messages; None: there are messages.
        choices: how many samples; each is recorded as a Chat.
        max_tokens: longest reply; None: as the job allows.
        min_tokens: shortest reply.
        thinking_budget: longest reasoning in tokens that the caller wants; None: not given.
        temperature: used if the job does not fix it; None: the job's.
        seed: used if the job does not fix it; None: derived from the job's.
        top_p: 1: all tokens.
        top_k: 0: all tokens.
        stop: strings that end the reply and are not a part of it.
        stop_token_ids: tokens that end the reply and are not a part of it, in addition to the policy's own.
        presence_penalty: see `SamplingParams`.
        frequency_penalty: see `SamplingParams`.
        logit_bias: pairs of a token and what is added to its score.
        top_logprobs: how many probable tokens to report to the listener at each position; they are not recorded.
        tools: tools that the prompt describes, in OpenAI's shape.
        tool_choice: with `none`, text that looks like a tool call stays text.
        tool_name: with `required`: the tool to call; None: any.
        parallel_tool_calls: False: the reply ends with its first tool call.
        response_schema: JSON schema that the content has to match; None: any content.
        response_choices: texts of which the content has to be one; (): any content.
        agent: the agent that asks; a subagent's name starts with its parent's, as in "planner/search".
        time_step: interaction with the environment; None: every call is a TimeStep of its own.
        digest: of the request's body, to recognise a retry.
        retry: whether the client says that it has sent this request before.
    """

    policy: str
    messages: tuple[ChatMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    choices: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    thinking_budget: int | None = None
    temperature: float | None = None
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    response_schema: dict[str, Any] | None = None
    response_choices: tuple[str, ...] = ()
    agent: str = "agent"
    time_step: int | None = None
    digest: str = ""
    retry: bool = False

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """Return the tools whose calls are parsed in the reply."""
        return () if self.tool_choice == "none" else self.tools

    def choice_digest(self, choice: int) -> str:
        """Return the digest by which a retry recognises a choice, by its number."""
        return self.digest if choice == 0 else f"{self.digest}.{choice}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStart:
    """The facts about a choice that are known before its first token.

    Attributes:
        episode_id: of the episode.
        fence: of the lease.
        index: of the choice's Chat.
        prompt_ids: int32 [P].
        shared: how many of them are those of an earlier call.
        sampling: how it is sampled.
    """

    episode_id: str
    fence: int
    index: int
    prompt_ids: Ids
    shared: int
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPiece:
    """Tokens as they were sampled, and the part of the message that became certain with them. Either may be empty.

    Attributes:
        delta: the part of the message.
        ids: the tokens.
        logprobs: of the tokens.
        top: see `SampledTokens`.
    """

    delta: MessageDelta
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


class Listener(Protocol):
    """Follows each choice while it is sampled: `started` once, `sampled` any number of times, `finished` once.

    The pieces of a choice, put together, are its message and its tokens. Methods must return quickly, because they are
    called on the event loop.
    """

    def started(self, choice: int, start: CallStart) -> None:
        """Receive the prompt and the sampling parameters of a choice, before its first token."""
        ...

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Receive the next piece of a choice's reply."""
        ...

    def finished(self, choice: int, chat: Chat) -> None:
        """Receive the whole call, which is on disk now."""
        ...
