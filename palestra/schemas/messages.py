"""Chat messages in OpenAI's shape; content is always a list of parts."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator


def _without_surrogates(text: str) -> str:
    """Lone surrogates, which neither a tokenizer nor a file takes, become `?`."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


Text = Annotated[str, AfterValidator(_without_surrogates)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


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


class ChatMessage(BaseModel):
    """One message. Keys that carry no content for the model (`refusal: null`, `annotations: []`) are dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    content: tuple[Part, ...] = ()
    name: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        if value is None:
            return ()
        return ({"type": "text", "text": value},) if isinstance(value, str) else value

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


def text_message(role: Role, text: str) -> ChatMessage:
    """A message of one text part."""
    return ChatMessage(role=role, content=(TextPart(text=text),))


def message_chain(messages: tuple[ChatMessage, ...], start: bytes = b"") -> list[bytes]:
    """Rolling hashes: entry k stands for the first k+1 messages (after whatever `start` stands for).

    Two conversations agree up to a message exactly when their entries there are equal, so the longest common
    history is found by looking up hashes, without comparing text.
    """
    chain, state = [], start
    for message in messages:
        state = hashlib.blake2b(state + message.model_dump_json(exclude_none=True).encode(), digest_size=16).digest()
        chain.append(state)
    return chain
