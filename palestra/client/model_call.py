"""A model call of an episode over HTTP, in the dialect of OpenAI's chat completions."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from palestra.client.episode import Episode
from palestra.client.protocol import ApiCall
from palestra.types.calls import FinishReason
from palestra.types.messages import ChatMessage, TextPart, ToolChoice

MODEL_SECONDS = 600.0  # limit for one reply; the call is then sent again, and answered from the record if there is one


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """A request of an agent to a model.

    Attributes:
        choices: the allowed replies; (): any.
        max_tokens: None: the job's limit.
        temperature: used if the job does not fix it; None: the job's.
        time_step: TimeStep of the call; None: the call is its own TimeStep.
    """

    policy: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    choices: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    agent: str
    time_step: int | None = None


class ModelReply(BaseModel):
    """The fields of a model call's answer that a player uses."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    class Choice(BaseModel):
        """The reply."""

        message: ChatMessage
        finish_reason: str
        token_ids: tuple[int, ...] = ()
        logprobs: ModelReply.Logprobs | None = None

    class Logprobs(BaseModel):
        """The log-probabilities of the reply's tokens."""

        content: tuple[ModelReply.Logprob, ...]

    class Logprob(BaseModel):
        """The log-probability of one token."""

        logprob: float

    id: str = Field(description="Ends with the lease and the number of the recorded call.")
    choices: tuple[Choice]
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def message(self) -> ChatMessage:
        """Return the reply."""
        return self.choices[0].message

    @property
    def logprobs(self) -> list[float]:
        """Return the log-probability of each token of the reply."""
        found = self.choices[0].logprobs
        return [] if found is None else [token.logprob for token in found.content]

    @property
    def finish_reason(self) -> FinishReason:
        """Return how the reply ended; tool calls count as text."""
        return "length" if self.choices[0].finish_reason == "length" else "stop"

    @property
    def lease_and_index(self) -> tuple[int, int]:
        """Return the fence of the lease under which the call was recorded, and the call's index."""
        _, fence, index = self.id.rsplit("-", 2)
        return int(fence), int(index)


def _is_unset(value: object) -> bool:
    return value is None or value == ()


class _ChatBody(BaseModel):
    """Request of `POST /v1/chat/completions`, without unset fields."""

    model: str
    messages: list[dict[str, Any]]
    return_token_ids: bool = True
    logprobs: bool = True
    tools: tuple[dict[str, Any], ...] = Field((), exclude_if=_is_unset)
    tool_choice: ToolChoice = Field("auto", exclude_if=lambda choice: choice == "auto")
    structured_outputs: dict[str, tuple[str, ...]] | None = Field(None, exclude_if=_is_unset)
    max_tokens: int | None = Field(None, exclude_if=_is_unset)
    temperature: float | None = Field(None, exclude_if=_is_unset)


def _written(message: ChatMessage) -> dict[str, Any]:
    """Return a message in OpenAI's shape, as short as possible: each call sends the conversation again."""
    parts = message.content
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return {"role": message.role, "content": parts[0].text} | _others(message)
    return {"role": message.role, "content": [part.model_dump() for part in parts]} | _others(message)


def _others(message: ChatMessage) -> dict[str, Any]:
    """Return the fields of a message other than role and content."""
    return message.model_dump(exclude={"role", "content"}, exclude_defaults=True)


def model_call(episode: Episode, call: ModelCall) -> ApiCall[ModelReply]:
    """Build the request of a model call. Repeating it returns the same recorded reply."""
    body = _ChatBody(
        model=call.policy,
        messages=[_written(message) for message in call.messages],
        tools=call.tools,
        tool_choice=call.tool_choice,
        structured_outputs={"choice": call.choices} if call.choices else None,
        max_tokens=call.max_tokens,
        temperature=call.temperature,
    )
    # By the key the server knows the call again, also where it has sent a reply that did not arrive.
    headers = {"idempotency-key": uuid.uuid4().hex.encode()}
    headers |= {name: text.encode() for name, text in episode.headers(call.agent, call.time_step).items()}
    return ApiCall(
        "/v1/chat/completions", body, ModelReply, episode.api_key, timeout_seconds=MODEL_SECONDS, headers=headers
    )
