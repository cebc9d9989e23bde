"""What an agent asks of a model, and what it may hear while the reply is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from palestra.chat import MessageDelta
from palestra.schemas.messages import ChatMessage, ToolChoice
from palestra.schemas.records import Chat, Ids, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One request: messages, or a prompt as it is, and how to sample."""

    policy: str
    messages: tuple[ChatMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None  # instead of messages: text or token ids as they are
    choices: int = 1  # how many samples; each is a Chat of its own
    max_tokens: int | None = None  # None: as many as the job allows
    min_tokens: int = 0
    thinking_budget: int | None = None  # tokens that the caller would have the reasoning take at most
    temperature: float | None = None  # used where the job does not fix it
    seed: int | None = None  # likewise
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop: tuple[str, ...] = ()  # strings that end the reply, and are not part of it
    stop_token_ids: tuple[int, ...] = ()  # likewise tokens, beside the policy's own
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its score)
    top_logprobs: int = 0  # told to the listener, not recorded
    tools: tuple[dict[str, Any], ...] = ()  # that the model is told of, in OpenAI's shape
    tool_choice: ToolChoice = "auto"  # none: what looks like a call stays text
    tool_name: str | None = None  # with "required": this tool
    parallel_tool_calls: bool = True  # False: the reply ends with its first call
    response_schema: dict[str, Any] | None = None  # JSON schema that the content has to meet
    response_choices: tuple[str, ...] = ()  # the content has to be one of these; none: anything
    agent: str = "agent"  # a subagent's name starts with its parent's: "planner/search"
    time_step: int | None = None  # None: every call is a TimeStep of its own
    digest: str = ""  # of the request, to know a retry
    retry: bool = False  # the client says that it has sent this before

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """Tools whose calls are looked for in the reply."""
        return () if self.tool_choice == "none" else self.tools

    def choice_digest(self, choice: int) -> str:
        """What a retry knows the choice by."""
        return self.digest if choice == 0 else f"{self.digest}.{choice}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStart:
    """What is known of a choice before its first token."""

    episode_id: str
    fence: int
    index: int  # of its Chat
    prompt_ids: Ids  # [P]
    shared: int  # how many of them are those of an earlier call
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPiece:
    """Tokens as they were sampled, and what became certain of the message with them. Either may be empty."""

    delta: MessageDelta
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # see `SampledTokens`


class Listener(Protocol):
    """Hears of each choice in this order: started once, sampled any number of times, finished once.

    The pieces of a choice, put together, are its message and its tokens.
    """

    def started(self, choice: int, start: CallStart) -> None:
        """The prompt is there."""
        ...

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """More of the reply."""
        ...

    def finished(self, choice: int, chat: Chat) -> None:
        """The reply is complete, and on disk."""
        ...
