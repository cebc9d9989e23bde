"""Items of OpenAI's responses: items of a request become messages, and a reply becomes items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from palestra.errors import InvalidRequest
from palestra.http.bodies import UNSUPPORTED
from palestra.server.dialects.answers import answer_id
from palestra.server.dialects.sent_pictures import Detail, SentPicture, from_url
from palestra.server.dialects.transcript import Transcript, recorded_content
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, Part, Text, TextPart

_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class _Item(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TextContent(_Item):
    """A text in an input or output item."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class ImageContent(_Item):
    """A picture in an item: its URL, or an uploaded picture's digest as `file_id`."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None

    @model_validator(mode="after")
    def _is_one(self) -> ImageContent:
        if (self.image_url is None) == (self.file_id is None):
            raise ValueError("a picture has image_url or file_id, and not both")
        return self

    def sent(self, place: str) -> SentPicture:
        """Return the picture of the part at path `place` of the body."""
        if self.image_url is not None:
            return from_url(self.image_url, self.detail, place)
        return SentPicture(place=place, named=self.file_id, low=self.detail == "low")


_KINDS = ("input_text", "output_text", "text", "input_image")
_Content = Annotated[TextContent | ImageContent, Field(discriminator="type")]


def _content(value: Any) -> Any:
    """Return text or parts as parts; refuse parts that are neither text nor pictures."""
    if isinstance(value, str):
        return ({"type": "input_text", "text": value},)
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in _KINDS:
            raise PydanticCustomError(UNSUPPORTED, "content of type {kind} is not supported", {"kind": repr(kind)[:60]})
    return value


Contents = Annotated[tuple[_Content, ...], BeforeValidator(_content, json_schema_input_type=str | tuple[_Content, ...])]


class MessageItem(_Item):
    """A message of the user, the model, the system or a developer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents


class FunctionCallItem(_Item):
    """A tool call of the model."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionOutputItem(_Item):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Contents


class ReasoningText(_Item):
    """A text in a reasoning item."""

    text: Text


class ReasoningItem(_Item):
    """The model's reasoning before its answer."""

    type: Literal["reasoning"]
    content: tuple[ReasoningText, ...] | None = None


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        kind = value.get("type", "message")
        if isinstance(kind, str) and kind not in _ITEMS:
            raise PydanticCustomError(UNSUPPORTED, "an item of type {kind} is not supported", {"kind": repr(kind)[:60]})
        return {"type": kind} | value
    return value


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_AnyItem = Annotated[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem, Field(discriminator="type")]
Item = Annotated[_AnyItem, BeforeValidator(_typed, json_schema_input_type=_AnyItem)]
Items = Annotated[
    tuple[Item, ...],
    BeforeValidator(_items, json_schema_input_type=str | tuple[Item, ...]),
    Field(min_length=1, max_length=10_000),
]


def messages_of_items(instructions: str | None, items: Sequence[Item]) -> tuple[ChatMessage, ...]:
    """Return the messages of items; the items of one reply become one message again. `instructions`: text of a system
    message that comes first, if any.
    """
    out = Transcript()
    if instructions:
        out.say("system", instructions)
    for number, item in enumerate(items):
        if isinstance(item, MessageItem):
            out.say(item.role, recorded_content(_parts(item.content, f"input.{number}.content")))
        elif isinstance(item, FunctionCallItem):
            out.call(item.call_id, item.name, item.arguments)
        elif isinstance(item, FunctionOutputItem):
            out.result(item.call_id, recorded_content(_parts(item.output, f"input.{number}.output")))
        else:
            out.think("".join(part.text for part in item.content or ()))
    if not out.messages:
        raise InvalidRequest("input has no message", "input")
    return out.messages


def _parts(contents: Sequence[TextContent | ImageContent], place: str) -> list[Part]:
    """Return texts and pictures of an item at path `place` of the body."""
    return [
        TextPart(text=part.text) if isinstance(part, TextContent) else part.sent(f"{place}.{k}")
        for k, part in enumerate(contents)
    ]


def items_of(chat: Chat) -> list[dict[str, Any]]:
    """Return the items of a reply: reasoning, message, tool calls."""
    name, reply = answer_id("", chat), chat.reply
    status = "incomplete" if chat.finish_reason == "length" else "completed"
    items = []
    if reply.reasoning_content is not None:
        over = "completed" if reply.text or reply.tool_calls else status
        items.append(reasoning_item(name, reply.reasoning_content, over))
    if reply.text or not reply.tool_calls:
        items.append(message_item(name, reply.text, status))
    for number, call in enumerate(reply.tool_calls):
        items.append(
            {
                "id": f"fc{name}-{number}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.function.name,
                "arguments": call.function.arguments,
                "status": "completed",
            }
        )
    return items


def reasoning_item(name: str, text: str, status: str) -> dict[str, Any]:
    """Return a reasoning item. `name`: id of the answer, the end of the item's id. An empty `text`: the item has
    no content yet.
    """
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": f"rs{name}", "type": "reasoning", "summary": [], "content": content, "status": status}


def message_item(name: str, text: str | None, status: str) -> dict[str, Any]:
    """Return a text item. `name`: id of the answer, the end of the item's id. `text` None: the item has no content
    yet.
    """
    content = [] if text is None else [text_part(text)]
    return {"id": f"msg{name}", "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    """Return the content part of a text item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
