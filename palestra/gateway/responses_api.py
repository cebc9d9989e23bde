"""`/v1/responses`: OpenAI's newer dialect, translated to the same calls. Nothing is stored beside the episode."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import InvalidRequest
from palestra.gateway.answering import answer
from palestra.gateway.bodies import parse_aside, read_body
from palestra.gateway.callers import caller_of
from palestra.gateway.fields import (
    Count,
    Flag,
    FunctionName,
    Probability,
    Schema,
    Temperature,
    call_fields,
    refuse_others,
)
from palestra.gateway.openapi import request_schema
from palestra.gateway.plane import DataPlane
from palestra.gateway.responses_answers import Echo, ResponseStream, response_of
from palestra.gateway.transcript import Transcript
from palestra.schemas.messages import ChatMessage, Text
from palestra.session import GenerationRequest

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
}
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class _Item(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TextContent(_Item):
    """Text that was put in or out."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


def _content(value: Any) -> Any:
    """Text, or parts, to parts; refuse what is no text."""
    if isinstance(value, str):
        return ({"type": "input_text", "text": value},)
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("input_text", "output_text", "text"):
            raise PydanticCustomError("not_text", "content of type {kind} is not supported", {"kind": repr(kind)[:60]})
    return value


Contents = Annotated[
    tuple[TextContent, ...], BeforeValidator(_content, json_schema_input_type=str | tuple[TextContent, ...])
]


class MessageItem(_Item):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents


class FunctionCallItem(_Item):
    """A tool that the model called."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionOutputItem(_Item):
    """What the tool answered."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Contents


class ReasoningText(_Item):
    """A part of what the model thought."""

    text: Text


class ReasoningItem(_Item):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    content: tuple[ReasoningText, ...] | None = None


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        kind = value.get("type", "message")
        if isinstance(kind, str) and kind not in _ITEMS:
            raise PydanticCustomError("not_text", "an item of type {kind} is not supported", {"kind": repr(kind)[:60]})
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


class FunctionTool(BaseModel):
    """One tool that the model may call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    allowed_callers: None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None


class NamedFunctionTool(BaseModel):
    """The one tool that has to be called."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    name: FunctionName


class TextFormat(BaseModel):
    """What the text has to be."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class TextOptions(BaseModel):
    """`text` of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: TextFormat | None = None


class ResponsesRequest(BaseModel):
    """The fields of OpenAI's request for a response that this server acts on."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(description="The policy's name, as the claim gave it.")
    input: Items = Field(
        description="Text, or the whole conversation as items: message, function_call, function_call_output, reasoning."
    )
    instructions: Text | None = Field(None, description="A system message in front.")
    max_output_tokens: Count | None = Field(None, description="Most tokens to sample; the job's own limit applies.")
    temperature: Temperature | None = Field(None, description="Used on ad-hoc episodes only.")
    top_p: Probability | None = Field(
        None, description="Below 1 refused or ignored in training episodes (`rollout.untrainable_sampling`)."
    )
    tools: Annotated[tuple[FunctionTool, ...], Field(max_length=1000)] | None = Field(
        None, description="What the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = Field(
        None, description="Required, or a tool's name: the reply is constrained to calls."
    )
    parallel_tool_calls: Flag | None = Field(None, description="False: the reply ends with its first call.")
    text: TextOptions | None = Field(None, description="`format`: text, json_object or json_schema.")
    stream: Flag | None = Field(None, description="Server-sent events, from the first text on.")


def add_responses_route(app: FastAPI, plane: DataPlane) -> None:
    """The route of the newer dialect."""

    @app.post("/v1/responses", tags=["model"], openapi_extra=request_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Sample a reply to a conversation of items. Each request carries all of it: nothing is kept by an id.

        Streamed, function calls come after the text, when the reply is complete.
        """
        session_of = caller_of(plane, request)
        call, echo = await parse_aside(partial(parse_response_request, request), request, plane.pool)
        writer = ResponseStream(echo, plane.store.clock.now()) if echo.stream else None
        return await answer(
            request, plane, session_of, [call], lambda played: response_of(played.chats[0], echo), writer
        )


def parse_response_request(request: Request, body: bytes) -> tuple[GenerationRequest, Echo]:
    """Check a request body; also what the answer repeats of it.

    Raises:
        InvalidRequest: not JSON, or a value of the wrong type.
        UnsupportedField: something this server does not do.
    """
    wanted = read_body(ResponsesRequest, body)
    refuse_others(wanted, _IGNORED, _HARMLESS)
    choice, messages = wanted.tool_choice, messages_of(wanted)
    if not messages:
        raise InvalidRequest("input has no message", "input")
    call = GenerationRequest(
        policy=wanted.model,
        messages=messages,
        max_tokens=wanted.max_output_tokens,
        temperature=wanted.temperature,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
        tools=tuple(map(_tool, wanted.tools or ())),
        tool_choice="required" if isinstance(choice, NamedFunctionTool) else choice or "auto",
        tool_name=choice.name if isinstance(choice, NamedFunctionTool) else None,
        parallel_tool_calls=wanted.parallel_tool_calls is not False,
        response_schema=_schema(wanted.text),
        **call_fields(body, request),
    )
    sent = wanted.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"input"})
    return call, Echo(call=call, sent=sent, stream=bool(wanted.stream))


def messages_of(wanted: ResponsesRequest) -> tuple[ChatMessage, ...]:
    """Items to messages; what one reply had as several items becomes one message again."""
    out = Transcript()
    if wanted.instructions:
        out.say("system", wanted.instructions)
    for item in wanted.input:
        if isinstance(item, MessageItem):
            out.say(item.role, "".join(part.text for part in item.content))
        elif isinstance(item, FunctionCallItem):
            out.call(item.call_id, item.name, item.arguments)
        elif isinstance(item, FunctionOutputItem):
            out.result(item.call_id, "".join(part.text for part in item.output))
        else:
            out.think("".join(part.text for part in item.content or ()))
    return out.messages


def _tool(tool: FunctionTool) -> dict[str, JsonValue]:
    return {
        "type": "function",
        "function": tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_unset=True),
    }


def _schema(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return {"type": "object"}
    if text.format.schema_ is None:
        raise InvalidRequest("text.format.schema is missing", "text.format.schema")
    return dict(text.format.schema_)
