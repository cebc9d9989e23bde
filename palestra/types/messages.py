"""Chat messages in OpenAI's shape, and observations of agents; content is always a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates by `?`, because neither tokenizers nor files can hold them."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


Text = Annotated[str, AfterValidator(_without_surrogates)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
# required: the reply has to be tool calls; none: the reply is not searched for tool calls.
ToolChoice = Literal["auto", "none", "required"]
StepReward = float | Mapping[str, float | None]
"""A reward: one number, or several by name, of which None was not scored."""
MAX_NAMED = 32  # rewards of an episode by name


class TextPart(BaseModel):
    """A piece of text in the content of a message, as the model reads it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text"] = "text"
    text: Text


class ImagePart(BaseModel):
    """An image in the content of a message, named by the digest of its bytes (content addressing)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["image"] = "image"
    # Only the digest is kept here: bytes in every record of a conversation would be stored again with each call.
    digest: str = Field(description="sha256 of the encoded image, in hex.")


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(BaseModel):
    """The name and the arguments with which the assistant calls a tool."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Text
    arguments: Text = Field(description="JSON text of an object, as the model wrote it.")


class ToolCall(BaseModel):
    """One tool call of the assistant. A message with role `tool` and the same `id` answers it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Text = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message of a conversation.

    Keys without content for the model (`refusal: null`, `annotations: []`) are dropped.

    Attributes:
        role: author of the message.
        content: text and images; a string becomes one text part, and None no content.
        name: the author's name, if the model's format supports it.
        reasoning_content: an assistant's reasoning before its answer.
        tool_calls: of an assistant's message.
        tool_call_id: of a tool's message: the id of the answered call.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    content: tuple[Part, ...] = ()
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        """Turn a string into one text part, and None into no parts."""
        if value is None:
            return ()
        return ({"type": "text", "text": value},) if isinstance(value, str) else value

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _calls(cls, value: Any) -> Any:
        """Turn None, which some clients send, into no calls."""
        return () if value is None else value

    @property
    def text(self) -> str:
        """Return the text parts of the content, joined without a separator."""
        content = self.content
        if len(content) == 1 and isinstance(content[0], TextPart):  # by far the most messages
            return content[0].text
        return "".join(part.text for part in content if isinstance(part, TextPart))


def text_message(role: Role, text: str) -> ChatMessage:
    """Return a message whose content is one text part."""
    return ChatMessage(role=role, content=(TextPart(text=text),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An event in an environment that one agent answers with an action.

    Attributes:
        id: unique in the episode.
        parents: observations whose actions caused this one; (): the episode's start.
        agent: name of the agent; a subagent's starts with its parent's, as in "planner/search".
        content: messages to append to the agent's conversation.
        tools: tools that the agent may call, in OpenAI's shape.
        choices: the allowed actions, such as the legal moves of a game; (): any text.
        reward: for the actions that caused it: a number, or several by name. None, also in place of one of several: not
            scored, which differs from 0.
        terminated: the agent's part has ended, so it must not act.
        truncated: the agent's part was cut off, for example by a limit.
        observed_at: Unix seconds.
        info: for people; recorded with the episode, as text.
    """

    id: str
    parents: tuple[str, ...]
    agent: str
    content: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    choices: tuple[str, ...] = ()
    reward: StepReward | None = None
    terminated: bool = False
    truncated: bool = False
    observed_at: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Return whether the agent's part has ended or was cut off, so that it must not act."""
        return self.terminated or self.truncated

    @property
    def tool_outputs(self) -> dict[str, str]:
        """Return the results of the agent's tool calls, by call id: `{"tool_outputs": …}` for agents that expect a
        dict.
        """
        return {message.tool_call_id or "": message.text for message in self.content if message.role == "tool"}
