"""`/v1/messages`: Anthropic's dialect, translated to the same calls."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.gateway.answering import answer
from palestra.gateway.bodies import parse_aside, read_body, until_disconnect
from palestra.gateway.callers import caller_of
from palestra.gateway.fields import (
    Count,
    Flag,
    FunctionName,
    Probability,
    Schema,
    StopStrings,
    Temperature,
    call_fields,
    refuse_others,
)
from palestra.gateway.messages_answers import MessageStream, message_of
from palestra.gateway.openapi import request_schema
from palestra.gateway.plane import DataPlane
from palestra.gateway.transcript import Transcript
from palestra.schemas.messages import ChatMessage, Text
from palestra.session import GenerationRequest

_IGNORED = ("metadata", "service_tier", "cache_control", "inference_geo")
_BLOCKS = ("text", "tool_use", "tool_result", "thinking")


class _Block(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: Text


class ToolUseBlock(_Block):
    """A tool that the model called."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, JsonValue]


class ThinkingBlock(_Block):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: Text


def _known(value: Any) -> Any:
    """Text, or blocks, to blocks; refuse those of other kinds."""
    if isinstance(value, str):
        return ({"type": "text", "text": value},)
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in _BLOCKS:
            raise PydanticCustomError("not_text", "content of type {kind} is not supported", {"kind": repr(kind)[:60]})
    return value


TextBlocks = Annotated[
    tuple[TextBlock, ...], BeforeValidator(_known, json_schema_input_type=str | tuple[TextBlock, ...])
]


class ToolResultBlock(_Block):
    """What the tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextBlocks = ()


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class Turn(BaseModel):
    """One message; what tools answered stands in the user's."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["user", "assistant", "system"]
    content: Annotated[tuple[Block, ...], BeforeValidator(_known, json_schema_input_type=str | tuple[Block, ...])]


class Tool(BaseModel):
    """One tool that the model may call."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Schema


class ToolChoice(BaseModel):
    """Whether, and which, tools have to be called."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: Flag | None = None


class ThinkingDisabled(BaseModel):
    """No wish: what the model does of itself stands."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["disabled"]


class ThinkingAdaptive(BaseModel):
    """The model decides how much it thinks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None  # thinking is returned, all of it; "omitted" is not done


class ThinkingEnabled(ThinkingAdaptive):
    """The same, with a wish for how much."""

    type: Literal["enabled"]  # type: ignore[assignment]  # of another kind of the same field
    budget_tokens: Count


Thinking = Annotated[ThinkingDisabled | ThinkingAdaptive | ThinkingEnabled, Field(discriminator="type")]


class CountRequest(BaseModel):
    """What a prompt is made of."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(description="The policy's name, as the claim gave it.")
    messages: Annotated[tuple[Turn, ...], Field(min_length=1, max_length=10_000)] = Field(
        description="The conversation so far: text, tool_use, tool_result and thinking blocks."
    )
    system: TextBlocks | None = Field(None, description="A system message in front.")
    tools: Annotated[tuple[Tool, ...], Field(max_length=1000)] | None = Field(
        None, description="What the model may call."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="`any` or `tool`: the reply is constrained to calls. `disable_parallel_tool_use`: at most one.",
    )
    thinking: Thinking | None = Field(
        None,
        description="`enabled` and `adaptive` where the model reasons, else 400. `budget_tokens` is less than "
        "`max_tokens` and bounds nothing: thinking and answer share `max_tokens`.",
    )


class MessagesRequest(CountRequest):
    """The fields of Anthropic's request that this server acts on."""

    max_tokens: Count = Field(description="Most tokens to sample; the job's own limit applies as well.")
    temperature: Temperature | None = Field(None, description="Used on ad-hoc episodes only.")
    top_p: Probability | None = Field(
        None, description="Below 1 refused or ignored in training episodes (`rollout.untrainable_sampling`)."
    )
    top_k: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        None, description="Above 0 not in training episodes."
    )
    stop_sequences: StopStrings | None = Field(None, description="Texts that end the reply.")
    stream: Flag | None = Field(None, description="Server-sent events, from the first text on.")


def add_messages_route(app: FastAPI, plane: DataPlane) -> None:
    """The route that Anthropic's client calls."""

    @app.post("/v1/messages", tags=["model"], openapi_extra=request_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Sample a reply, as Anthropic's client asks for it, with the key of an episode in `x-api-key`.

        Errors have Anthropic's shape. Streamed, tool_use blocks come after the text, when the reply is complete.
        """
        session_of = caller_of(plane, request)
        call, wanted = await parse_aside(partial(parse_messages, request), request, plane.pool)
        check_thinking(wanted, plane)
        writer = MessageStream(call.policy) if wanted.stream else None
        return await answer(request, plane, session_of, [call], lambda played: message_of(played.chats[0]), writer)

    @app.post("/v1/messages/count_tokens", tags=["model"], openapi_extra=request_schema(CountRequest))
    async def count_tokens(request: Request) -> dict[str, int]:
        """Count the tokens of the prompt that these messages would have now. Nothing is sampled or recorded."""
        session_of = caller_of(plane, request)
        call, wanted = await parse_aside(partial(parse_count, request), request, plane.pool)
        check_thinking(wanted, plane)
        with plane.sessions.admitted():
            async with session_of() as session:
                return {"input_tokens": await until_disconnect(request, session.count_tokens(call))}


def check_thinking(wanted: CountRequest, plane: DataPlane) -> None:
    """Refuse a wish for thinking where the model does not reason.

    Raises:
        NotFound: no such policy.
        UnsupportedField: the model does not reason.
    """
    if wanted.thinking is None or wanted.thinking.type == "disabled":
        return
    if not plane.sessions.context.runtime(wanted.model).renderer.reasons:
        raise UnsupportedField(
            f"thinking.type = '{wanted.thinking.type}': this model does not reason; leave thinking out", "thinking"
        )


def parse_count(request: Request, body: bytes) -> tuple[GenerationRequest, CountRequest]:
    """Check a request to count tokens. See `parse_messages` for errors."""
    wanted = read_body(CountRequest, body)
    refuse_others(wanted, _IGNORED, {})
    call = GenerationRequest(
        policy=wanted.model,
        messages=chat_messages(wanted),
        tools=tuple(map(_tool, wanted.tools or ())),
        **call_fields(body, request),
    )
    return call, wanted


def parse_messages(request: Request, body: bytes) -> tuple[GenerationRequest, MessagesRequest]:
    """Check a request body.

    Raises:
        InvalidRequest: not JSON, a value of the wrong type, or a budget for thinking that leaves none for the answer.
        UnsupportedField: something this server does not do.
    """
    wanted = read_body(MessagesRequest, body)
    refuse_others(wanted, _IGNORED, {})
    budget = wanted.thinking.budget_tokens if isinstance(wanted.thinking, ThinkingEnabled) else None
    if budget is not None and budget >= wanted.max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens = {budget} has to be less than max_tokens = {wanted.max_tokens}: the answer "
            "needs tokens, too",
            "thinking.budget_tokens",
        )
    choice = wanted.tool_choice or ToolChoice(type="auto")
    kinds: dict[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none"}
    call = GenerationRequest(
        policy=wanted.model,
        messages=chat_messages(wanted),
        max_tokens=wanted.max_tokens,
        thinking_budget=budget,
        temperature=wanted.temperature,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
        top_k=wanted.top_k or 0,
        stop=wanted.stop_sequences or (),
        tools=tuple(map(_tool, wanted.tools or ())),
        tool_choice=kinds.get(choice.type, "required"),
        tool_name=choice.name if choice.type == "tool" else None,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        **call_fields(body, request),
    )
    return call, wanted


def chat_messages(wanted: CountRequest) -> tuple[ChatMessage, ...]:
    """Turns of blocks to messages."""
    out = Transcript()
    if wanted.system:
        out.say("system", "\n\n".join(block.text for block in wanted.system))
    for turn in wanted.messages:
        text = "".join(block.text for block in turn.content if isinstance(block, TextBlock))
        if turn.role == "assistant":
            out.think("".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock)))
            out.say("assistant", text)
        for block in turn.content:
            if isinstance(block, ToolUseBlock):
                out.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            elif isinstance(block, ToolResultBlock):
                out.result(block.tool_use_id, "".join(part.text for part in block.content))
        results = any(isinstance(block, ToolResultBlock) for block in turn.content)
        if turn.role != "assistant" and (text or not results):
            out.say(turn.role, text)
    return out.messages


def _tool(tool: Tool) -> dict[str, JsonValue]:
    function: dict[str, JsonValue] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}
