"""Anthropic's content blocks: blocks of a request become messages, and a reply becomes blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from orjson import Fragment
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from palestra.http.bodies import UNSUPPORTED
from palestra.server.dialects.sent_pictures import SentPicture, from_url
from palestra.server.dialects.transcript import Transcript, recorded_content
from palestra.types.messages import ChatMessage, Part, Text, TextPart

# Clients drop reasoning, or send it back as text, where its signature is empty. It is not checked: recorded tokens are.
SIGNATURE = "palestra"
_BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking")


class _Block(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TextBlock(_Block):
    """A block of text in Anthropic's format, for messages and tool results."""

    type: Literal["text"]
    text: Text


class Base64Source(_Block):
    """A picture's file in the request itself."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(_Block):
    """A picture's address: a data URL, `sha256:` and a digest, or http(s) of an allowed host."""

    type: Literal["url"]
    url: str


class FileSource(_Block):
    """An uploaded picture; its digest is the file's id."""

    type: Literal["file"]
    file_id: str


class ImageBlock(_Block):
    """A picture in a user's message or a tool result."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]

    def sent(self, place: str) -> SentPicture:
        """Return the picture of the block at path `place` of the body."""
        if isinstance(self.source, Base64Source):
            return SentPicture(place=place, base64=self.source.data, media_type=self.source.media_type)
        if isinstance(self.source, FileSource):
            return SentPicture(place=place, named=self.source.file_id)
        return from_url(self.source.url, None, place)


class ToolUseBlock(_Block):
    """A tool call of the model; the result refers to its `id`."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, JsonValue]


class ThinkingBlock(_Block):
    """A block of the model's reasoning before its answer."""

    type: Literal["thinking"]
    thinking: Text


def _known(value: Any) -> Any:
    """Return text or blocks as blocks; refuse blocks of unknown types."""
    if isinstance(value, str):
        return ({"type": "text", "text": value},)
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in _BLOCKS:
            raise PydanticCustomError(UNSUPPORTED, "content of type {kind} is not supported", {"kind": repr(kind)[:60]})
    return value


TextBlocks = Annotated[
    tuple[TextBlock, ...], BeforeValidator(_known, json_schema_input_type=str | tuple[TextBlock, ...])
]


_ResultBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]
ResultBlocks = Annotated[
    tuple[_ResultBlock, ...], BeforeValidator(_known, json_schema_input_type=str | tuple[_ResultBlock, ...])
]


class ToolResultBlock(_Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: ResultBlocks = ()


Block = Annotated[TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class MessageParam(BaseModel):
    """One message as a list of blocks. Tool results are blocks of the user's message."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["user", "assistant", "system"]
    content: Annotated[tuple[Block, ...], BeforeValidator(_known, json_schema_input_type=str | tuple[Block, ...])]


def messages_of_blocks(system: Sequence[TextBlock], turns: Sequence[MessageParam]) -> tuple[ChatMessage, ...]:
    """Return the messages of blocks. `system` are the blocks of the system message, which comes first, if there is
    one.
    """
    out = Transcript()
    if system:
        out.say("system", "\n\n".join(block.text for block in system))
    for number, turn in enumerate(turns):
        place = f"messages.{number}.content"
        said = recorded_content(_parts(turn.content, place))
        if turn.role == "assistant":
            out.think("".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock)))
            out.say("assistant", said)
        for k, block in enumerate(turn.content):
            if isinstance(block, ToolUseBlock):
                out.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            elif isinstance(block, ToolResultBlock):
                out.result(block.tool_use_id, recorded_content(_parts(block.content, f"{place}.{k}.content")))
        results = any(isinstance(block, ToolResultBlock) for block in turn.content)
        if turn.role != "assistant" and (said or not results):
            out.say(turn.role, said)
    return out.messages


def _parts(blocks: Sequence[Any], place: str) -> list[Part]:
    """Return texts and pictures of blocks at path `place` of the body."""
    parts: list[Part] = []
    for k, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            parts.append(TextPart(text=block.text))
        elif isinstance(block, ImageBlock):
            parts.append(block.sent(f"{place}.{k}"))
    return parts


def blocks_of(reply: ChatMessage) -> list[dict[str, Any]]:
    """Return the blocks of a reply: thinking, text, tool calls."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning_content is not None:
        blocks.append({"type": "thinking", "thinking": reply.reasoning_content, "signature": SIGNATURE})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        given = Fragment(call.function.arguments)  # as written: JSON has numbers and texts that orjson can't write
        blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": given})
    return blocks
