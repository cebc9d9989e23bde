"""OpenAI's responses, `/v1/responses`, whole or as events. The server stores nothing by id: requests
contain all input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from palestra.errors import InvalidRequest
from palestra.http.bodies import parse_body
from palestra.server.dialects.answers import TokenBytes, answer_id, reasoning_tokens
from palestra.server.dialects.base import Dialect, DialectRequest, EventWriter, TokenCounter
from palestra.server.dialects.fields import (
    Count,
    Flag,
    Probability,
    Temperature,
    call_fields,
)
from palestra.server.dialects.others import MAX_NAME, OtherFields, other_fields
from palestra.server.dialects.responses_items import (
    Items,
    items_of,
    message_item,
    messages_of_items,
    reasoning_item,
    text_part,
)
from palestra.session import PolicyRuntime, ReplyPiece
from palestra.types.calls import Chat
from palestra.types.messages import FunctionName, GenerationRequest, Schema, Text

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
}
_UNUSED = (
    "user",
    "metadata",
    "client_metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "stream_options",
)
_WISHES = ("reasoning.effort", "reasoning.summary", "reasoning.generate_summary")


class FunctionToolParam(BaseModel):
    """A tool that the model may call, in the format of OpenAI's responses (without a nested `function`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    allowed_callers: None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None


class OtherTool(BaseModel):
    """A tool that the provider of a model runs, such as `web_search`: left out of the prompt, and counted."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "other" if isinstance(kind, str) and kind != "function" else "function"


ToolParam = Annotated[
    Annotated[FunctionToolParam, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(_kind_of_tool)
]


class NamedFunctionTool(BaseModel):
    """The name of the one tool that must be called."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    name: FunctionName


class TextFormat(BaseModel):
    """The required format of the reply's text: any text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class TextOptions(BaseModel):
    """The field `text` of a request, which has the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class InputRequest(BaseModel):
    """The fields of OpenAI's response request that make up the prompt."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(description="The policy's name, as the claim gave it.")
    input: Items = Field(
        description="Text, or the whole conversation as items: message, function_call, function_call_output, reasoning."
    )
    instructions: Text | None = Field(None, description="A system message that comes first.")
    tools: Annotated[tuple[ToolParam, ...], Field(max_length=1000)] | None = Field(
        None, description="Tools that the model may call; tools of other types than `function` are left out."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = Field(
        None, description="Required, or a tool's name: the reply is constrained to calls."
    )
    parallel_tool_calls: Flag | None = Field(None, description="False: the reply ends with its first call.")
    text: TextOptions | None = Field(
        None, description="`format`: text, json_object or json_schema. `verbosity` has no effect."
    )

    @property
    def functions(self) -> tuple[FunctionToolParam, ...]:
        """Return the tools that are functions."""
        return tuple(tool for tool in self.tools or () if isinstance(tool, FunctionToolParam))


class ResponsesRequest(InputRequest):
    """The fields of OpenAI's response request that this server supports."""

    max_output_tokens: Count | None = Field(None, description="Most tokens to sample; the job's own limit applies.")
    temperature: Temperature | None = Field(
        None, description="Used in ad-hoc episodes only; elsewhere the job has its own."
    )
    top_p: Probability | None = Field(
        None, description="Below 1: refused or ignored in training episodes (see `server.unknown_fields`)."
    )
    stream: Flag | None = Field(None, description="Server-sent events, from the first text on.")

    @cached_property
    def echo(self) -> dict[str, Any]:
        """Return the request's fields that its answer repeats: all but the input."""
        dumped = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"input", "tools"})
        tools = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in self.functions]
        return dumped | {"tools": tools}


class InputTokens(TokenCounter[InputRequest]):
    """OpenAI's route for counting the tokens of an input."""

    path = "/v1/responses/input_tokens"
    body = InputRequest
    description = "Count the tokens of the prompt that this input would have now. Nothing is sampled or recorded."

    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[InputRequest]:
        """Parse a request for counting. See `Dialect.parse`."""
        wanted = parse_body(InputRequest, body)
        call = GenerationRequest(**_prompt_fields(wanted), **call_fields(body, headers, self.path))
        return DialectRequest(body=wanted, calls=(call,), others=_others(wanted))

    def render(self, tokens: int) -> dict[str, Any]:
        """Return the number of tokens in OpenAI's format."""
        return {"object": "response.input_tokens", "input_tokens": tokens}


class Responses(Dialect[ResponsesRequest]):
    """The dialect of OpenAI's responses, without storage: each request has the whole conversation."""

    path = "/v1/responses"
    body = ResponsesRequest
    counter = InputTokens()
    description = """Sample a reply to a conversation of items. Each request has all of it: nothing is kept by an id.

Streamed, function calls come after the text, when the reply is complete."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[ResponsesRequest]:
        """Parse a request into one call. See `Dialect.parse`."""
        wanted = parse_body(ResponsesRequest, body)
        others = _others(wanted)
        choice = wanted.tool_choice
        call = GenerationRequest(
            max_tokens=wanted.max_output_tokens,
            temperature=wanted.temperature,
            top_p=1.0 if wanted.top_p is None else wanted.top_p,
            tool_choice="required" if isinstance(choice, NamedFunctionTool) else choice or "auto",
            tool_name=choice.name if isinstance(choice, NamedFunctionTool) else None,
            parallel_tool_calls=wanted.parallel_tool_calls is not False,
            response_schema=_schema(wanted.text),
            **_prompt_fields(wanted),
            **call_fields(body, headers, self.path),
        )
        wanted.echo  # noqa: B018 - computed now: long bodies are parsed in a thread, but answers begin on the event loop
        return DialectRequest(body=wanted, calls=(call,), stream=bool(wanted.stream), others=others)

    def render(
        self, request: DialectRequest[ResponsesRequest], chats: Sequence[Chat], runtime: PolicyRuntime
    ) -> dict[str, Any]:
        """Return the response object for `request` and its one choice."""
        (chat,) = chats
        return _response(request, chat, runtime.renderer.vocabulary.bytes_of)

    def sse(self, request: DialectRequest[ResponsesRequest], runtime: PolicyRuntime, created: float) -> EventWriter:
        """Return the writer of the response's events."""
        return _ResponseEvents(request, created, runtime.renderer.vocabulary.bytes_of)


def _prompt_fields(wanted: InputRequest) -> dict[str, Any]:
    return {
        "policy": wanted.model,
        "messages": messages_of_items(wanted.instructions, wanted.input),
        "tools": tuple(map(_tool, wanted.functions)),
    }


def _others(wanted: InputRequest) -> OtherFields:
    """Return the fields that have no effect, tools of other types included."""
    found = other_fields(wanted, _UNUSED, _HARMLESS, _WISHES)
    wishes = ["text.verbosity"] if wanted.text is not None and wanted.text.verbosity is not None else []
    wishes += [f"tools.{tool.type}"[:MAX_NAME] for tool in wanted.tools or () if isinstance(tool, OtherTool)]
    return OtherFields((*found.ignored, *wishes), found.unknown) if wishes else found


def _tool(tool: FunctionToolParam) -> dict[str, JsonValue]:
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


def _response(request: DialectRequest[ResponsesRequest], chat: Chat, bytes_of: TokenBytes) -> dict[str, Any]:
    """Return the whole response, from the recorded call."""
    cut = chat.finish_reason == "length"
    return _frame(request, answer_id("resp", chat), chat.finished_at) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "temperature": chat.sampling.temperature,
        "output": items_of(chat),
        "usage": {
            "input_tokens": chat.prompt_tokens,
            "input_tokens_details": {"cached_tokens": chat.shared, "cache_write_tokens": 0},
            "output_tokens": len(chat.completion_ids),
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(chat, bytes_of)},
            "total_tokens": chat.tokens,
        },
    }


def _frame(request: DialectRequest[ResponsesRequest], name: str, created: float) -> dict[str, Any]:
    """Return a response without output: the fields that repeat its request."""
    (call,) = request.calls
    sent = request.body.echo
    return {
        "id": name,
        "object": "response",
        "created_at": int(created),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": sent.get("instructions"),
        "max_output_tokens": sent.get("max_output_tokens"),
        "metadata": {},
        "model": call.policy,
        "output": [],
        "parallel_tool_calls": call.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sent.get("temperature"),
        "text": sent.get("text", {"format": {"type": "text"}}),
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": sent.get("tools", []),
        "top_p": call.top_p,
        "truncation": "disabled",
        "usage": None,
    }


class _ResponseEvents(EventWriter):
    """Writes the events of one response. An item is closed before the next one opens."""

    def __init__(self, request: DialectRequest[ResponsesRequest], created: float, bytes_of: TokenBytes) -> None:
        super().__init__()
        self._request, self._created, self._bytes_of = request, created, bytes_of
        self._sequence = 0
        self._name = ""
        self._output: list[dict[str, Any]] = []  # items so far, the open one included
        self._open: str | None = None  # type of the open item, if any
        self._text: list[str] = []  # text of the open item

    def started(self, choice: int, chat: Chat) -> None:
        """Write `response.created` and `response.in_progress`, both with a response without output."""
        self._name = answer_id("", chat)
        frame = _frame(self._request, f"resp{self._name}", self._created)
        self._event("response.created", response=frame)
        self._event("response.in_progress", response=frame)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Write the new reasoning and text as deltas of their items."""
        if piece.delta.reasoning:
            self._add("reasoning", piece.delta.reasoning)
        if piece.delta.content:
            self._add("message", piece.delta.content)

    def finished(self, choice: int, chat: Chat) -> None:
        """Close the open item, write the remaining items, then the whole response."""
        items = items_of(chat)
        if self._open is not None:
            self._close(items[len(self._output) - 1])
        for item in items[len(self._output) :]:
            if item["type"] == "function_call":
                self._call(item)
            else:  # a message without text
                self._begin(item["type"])
                self._close(item)
        kind = "response.incomplete" if chat.finish_reason == "length" else "response.completed"
        self._event(kind, response=_response(self._request, chat, self._bytes_of) | {"created_at": int(self._created)})

    def failed(self, body: Mapping[str, Any]) -> None:
        """Write the error as an event of the type `error`."""
        error = body["error"]
        self._event("error", code=error["code"], message=error["message"], param=error["param"], error=error)

    def _add(self, kind: str, text: str) -> None:
        if self._open != kind:
            if self._open is not None:
                self._close(reasoning_item(self._name, "".join(self._text), "completed"))
            self._begin(kind)
        self._text.append(text)
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        if kind == "message":
            self._event("response.output_text.delta", **place, delta=text, logprobs=[])
        else:
            self._event("response.reasoning_text.delta", **place, delta=text)

    def _begin(self, kind: str) -> None:
        empty = (
            message_item(self._name, None, "in_progress")
            if kind == "message"
            else reasoning_item(self._name, "", "in_progress")
        )
        self._output.append(empty)
        self._open = kind
        self._text.clear()
        index = len(self._output) - 1
        self._event("response.output_item.added", output_index=index, item=empty)
        part = text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        self._event("response.content_part.added", item_id=empty["id"], output_index=index, content_index=0, part=part)

    def _close(self, item: dict[str, Any]) -> None:
        index = len(self._output) - 1
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        part = item["content"][0]
        if item["type"] == "message":
            self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
        else:
            self._event("response.reasoning_text.done", **place, text=part["text"])
        self._event("response.content_part.done", **place, part=part)
        self._event("response.output_item.done", output_index=index, item=item)
        self._output[-1] = item
        self._open = None

    def _call(self, item: dict[str, Any]) -> None:
        index = len(self._output)
        self._output.append(item)
        begun = item | {"arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        self._event("response.output_item.added", output_index=index, item=begun)
        self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        self._event("response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"])
        self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> None:
        self.write({"type": kind, "sequence_number": self._sequence} | fields, kind)
        self._sequence += 1
