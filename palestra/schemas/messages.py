"""Chat messages in OpenAI's shape; content is always a list of parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator


def _without_surrogates(text: str) -> str:
    """Lone surrogates, which neither a tokenizer nor a file takes, become `?`."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


Text = Annotated[str, AfterValidator(_without_surrogates)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
ToolChoice = Literal["auto", "none", "required"]  # required: a reply is calls of tools; none: no call is looked for


class TextPart(BaseModel):
    """Text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text"] = "text"
    text: Text


class ImagePart(BaseModel):
    """An image, by the content address of its bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["image"] = "image"
    digest: str = Field(description="sha256 of the encoded image, in hex.")


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(BaseModel):
    """What a tool is called with."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Text
    arguments: Text = Field(description="JSON text of an object, as the model wrote it.")


class ToolCall(BaseModel):
    """One call of a tool by the assistant."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Text = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message. Keys that carry no content for the model (`refusal: null`, `annotations: []`) are dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    content: tuple[Part, ...] = ()
    name: Text | None = None
    reasoning_content: Text | None = None  # of the assistant: what it thought before it answered
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: Text | None = None  # of a tool's message: the call that it answers

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        if value is None:
            return ()
        return ({"type": "text", "text": value},) if isinstance(value, str) else value

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _calls(cls, value: Any) -> Any:
        return () if value is None else value

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


def text_message(role: Role, text: str) -> ChatMessage:
    """A message of one text part."""
    return ChatMessage(role=role, content=(TextPart(text=text),))
