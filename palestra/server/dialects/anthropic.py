"""Anthropic's messages, `/v1/messages`, whole and as events, and its route to count tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from palestra.errors import InvalidRequest
from palestra.http.bodies import UNSUPPORTED, parse_body
from palestra.http.errors import Failure
from palestra.server.dialects.answers import answer_id
from palestra.server.dialects.anthropic_blocks import (
    SIGNATURE,
    MessageParam,
    TextBlocks,
    blocks_of,
    messages_of_blocks,
)
from palestra.server.dialects.base import Dialect, DialectRequest, EventWriter, TokenCounter
from palestra.server.dialects.fields import (
    MOST_TOP_K,
    Count,
    Flag,
    Probability,
    StopStrings,
    Temperature,
    call_fields,
)
from palestra.server.dialects.others import OtherFields, other_fields
from palestra.session import PolicyRuntime, ReplyPiece
from palestra.session.sampling import CALL_END
from palestra.types.calls import Chat
from palestra.types.messages import FunctionName, GenerationRequest, Schema

_UNUSED = ("metadata", "service_tier", "cache_control", "inference_geo")
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ToolParam(BaseModel):
    """A tool that the model may call, in Anthropic's format."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Schema


class ToolChoice(BaseModel):
    """Which tools must or may be called, in Anthropic's format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: Flag | None = None


class ThinkingDisabled(BaseModel):
    """No request about reasoning: the model reasons or not, as it was trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["disabled"]


class ThinkingAdaptive(BaseModel):
    """The model decides how much it reasons; one that does not reason decides on no reasoning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None  # all reasoning is returned; "omitted" is not supported


class ThinkingEnabled(ThinkingAdaptive):
    """Reasoning with a budget in tokens, which is validated but has no other effect."""

    type: Literal["enabled"]  # type: ignore[assignment]  # narrows the inherited field to another literal
    budget_tokens: Count


Thinking = Annotated[ThinkingDisabled | ThinkingAdaptive | ThinkingEnabled, Field(discriminator="type")]


class ContextEdit(BaseModel):
    """A change of the prompt before it is sampled. Only one that keeps all reasoning is accepted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Annotated[str, Field(max_length=100)]
    keep: JsonValue = None

    @model_validator(mode="after")
    def _changes_nothing(self) -> ContextEdit:
        if not self.type.startswith("clear_thinking") or self.keep != "all":
            raise PydanticCustomError(UNSUPPORTED, "the edit {type} would change the prompt", {"type": repr(self.type)})
        return self


class ContextManagement(BaseModel):
    """Changes of the prompt before it is sampled, which have to change nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    edits: tuple[ContextEdit, ...] = ()


class OutputFormat(BaseModel):
    """The JSON schema that the text of a reply must match."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(BaseModel):
    """Wishes about the reply: `effort` has no effect, and `format` constrains the text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(BaseModel):
    """The fields of Anthropic's request that make up the prompt."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(description="The policy's name, as the claim gave it.")
    messages: Annotated[tuple[MessageParam, ...], Field(min_length=1, max_length=10_000)] = Field(
        description="The conversation so far: text, tool_use, tool_result and thinking blocks."
    )
    system: TextBlocks | None = Field(None, description="A system message that comes first.")
    tools: Annotated[tuple[ToolParam, ...], Field(max_length=1000)] | None = Field(
        None, description="Tools that the model may call."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="`any` or `tool`: the reply is constrained to calls. `disable_parallel_tool_use`: at most one.",
    )
    thinking: Thinking | None = Field(
        None,
        description="`enabled` where the model reasons, else 400. `budget_tokens` is less than `max_tokens` and bounds "
        "nothing: thinking and answer share `max_tokens`.",
    )
    context_management: ContextManagement | None = Field(
        None, description="Edits that change nothing: `clear_thinking_…` with `keep` = all."
    )
    output_config: OutputConfig | None = Field(
        None,
        description="`format`: the reply is constrained to its JSON schema, without reasoning. `effort` has no effect.",
    )


class MessagesRequest(CountRequest):
    """The fields of Anthropic's request that this server supports."""

    max_tokens: Count = Field(description="Most tokens to sample; the job's own limit applies as well.")
    temperature: Temperature | None = Field(
        None, description="Used in ad-hoc episodes only; elsewhere the job has its own."
    )
    top_p: Probability | None = Field(
        None, description="Below 1: refused or ignored in training episodes (see `server.unknown_fields`)."
    )
    top_k: Annotated[int, Field(ge=0, le=MOST_TOP_K, strict=True)] | None = Field(
        None, description="Above 0: not possible in training episodes."
    )
    stop_sequences: StopStrings | None = Field(None, description="Texts that end the reply.")
    stream: Flag | None = Field(None, description="Server-sent events, from the first text on.")


class CountTokens(TokenCounter[CountRequest]):
    """Anthropic's route for counting the tokens of a prompt."""

    path = "/v1/messages/count_tokens"
    body = CountRequest
    description = "Count the tokens of the prompt that these messages would have now. Nothing is sampled or recorded."

    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[CountRequest]:
        """Parse a request for counting. See `Dialect.parse`."""
        wanted = parse_body(CountRequest, body)
        call = GenerationRequest(**_prompt_fields(wanted), **call_fields(body, headers, self.path))
        must_reason = isinstance(wanted.thinking, ThinkingEnabled)
        return DialectRequest(body=wanted, calls=(call,), must_reason=must_reason, others=_others(wanted))

    def render(self, tokens: int) -> dict[str, int]:
        """Return the number of tokens in Anthropic's format."""
        return {"input_tokens": tokens}


class Messages(Dialect[MessagesRequest]):
    """The dialect of Anthropic's messages, whose content is a list of blocks."""

    path = "/v1/messages"
    body = MessagesRequest
    counter = CountTokens()
    description = """Sample a reply, as Anthropic's client asks for it, with the key of an episode in `x-api-key`.

Errors have Anthropic's shape. Streamed, tool_use blocks come after the text, when the reply is complete."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[MessagesRequest]:
        """Parse a request into one call. See `Dialect.parse`."""
        wanted = parse_body(MessagesRequest, body)
        others = _others(wanted)
        output = wanted.output_config.format if wanted.output_config is not None else None
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
            max_tokens=wanted.max_tokens,
            thinking_budget=budget,
            temperature=wanted.temperature,
            top_p=1.0 if wanted.top_p is None else wanted.top_p,
            top_k=wanted.top_k or 0,
            stop=wanted.stop_sequences or (),
            tool_choice=kinds.get(choice.type, "required"),
            tool_name=choice.name if choice.type == "tool" else None,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            response_schema=None if output is None else dict(output.schema_),
            **_prompt_fields(wanted),
            **call_fields(body, headers, self.path),
        )
        return DialectRequest(
            body=wanted,
            calls=(call,),
            stream=bool(wanted.stream),
            must_reason=budget is not None,
            others=others,
        )

    def render(
        self, request: DialectRequest[MessagesRequest], chats: Sequence[Chat], runtime: PolicyRuntime
    ) -> dict[str, Any]:
        """Return the message in Anthropic's format of the one choice."""
        (chat,) = chats
        return _frame(answer_id("msg", chat), chat.policy) | {
            "content": blocks_of(chat.reply),
            **_end(chat),
            "usage": _usage(chat.prompt_tokens, chat.shared, len(chat.completion_ids)),
        }

    def sse(self, request: DialectRequest[MessagesRequest], runtime: PolicyRuntime, created: float) -> EventWriter:
        """Return the writer of Anthropic's events for `request`."""
        return _MessageEvents(runtime.name)

    def error_body(self, failure: Failure) -> dict[str, Any]:
        """Return an error in Anthropic's format, with Palestra's stable error name as `code`."""
        kind = _ERRORS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": failure.message, "code": failure.code}}


def _prompt_fields(wanted: CountRequest) -> dict[str, Any]:
    return {
        "policy": wanted.model,
        "messages": messages_of_blocks(wanted.system or (), wanted.messages),
        "tools": tuple(map(_tool, wanted.tools or ())),
    }


def _others(wanted: CountRequest) -> OtherFields:
    """Return the fields that have no effect."""
    found = other_fields(wanted, _UNUSED, {}, ())
    if wanted.output_config is None or wanted.output_config.effort is None:
        return found
    return OtherFields(("output_config.effort", *found.ignored), found.unknown)


def _tool(tool: ToolParam) -> dict[str, JsonValue]:
    function: dict[str, JsonValue] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _frame(name: str, model: str) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def _end(chat: Chat) -> dict[str, Any]:
    # A caller's own stop string of this text would have cut the call before it was one.
    string = None if chat.stop == CALL_END and chat.reply.tool_calls else chat.stop
    reason = "end_turn" if string is None else "stop_sequence"
    if chat.reply.tool_calls:
        reason = "tool_use"
    return {"stop_reason": "max_tokens" if chat.finish_reason == "length" else reason, "stop_sequence": string}


def _usage(prompt: int, shared: int, sampled: int) -> dict[str, Any]:
    """Return Anthropic's usage, in which cached input counts separately."""
    return {
        "input_tokens": prompt - shared,
        "cache_read_input_tokens": shared,
        "cache_creation_input_tokens": 0,
        "output_tokens": sampled,
    }


class _MessageEvents(EventWriter):
    """Writes the events of one message. A block is closed before the next one opens."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._blocks = 0  # number of blocks so far
        self._open: str | None = None  # type of the open block, if any

    def started(self, choice: int, chat: Chat) -> None:
        """Write `message_start`, with the usage of the prompt."""
        name = answer_id("msg", chat)
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(chat.prompt_tokens, chat.shared, 0)
        self._event("message_start", message=_frame(name, self._model) | begun | {"usage": usage})

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Write the new reasoning and text as deltas of their blocks."""
        if piece.delta.reasoning:
            self._begin("thinking", {"thinking": "", "signature": ""})
            self._delta({"type": "thinking_delta", "thinking": piece.delta.reasoning})
        if piece.delta.content:
            self._begin("text", {"text": ""})
            self._delta({"type": "text_delta", "text": piece.delta.content})

    def finished(self, choice: int, chat: Chat) -> None:
        """Write the blocks of tool calls, then the stop reason and the usage."""
        for call in chat.reply.tool_calls:
            self._close()
            self._begin("tool_use", {"id": call.id, "name": call.function.name, "input": {}})
            self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})
        self._close()
        usage = _usage(chat.prompt_tokens, chat.shared, len(chat.completion_ids))
        self._event("message_delta", delta=_end(chat), usage=usage)
        self._event("message_stop")

    def failed(self, body: Mapping[str, Any]) -> None:
        """Write the error as an event of the type `error`."""
        self.write(body, "error")

    def _begin(self, kind: str, empty: Mapping[str, Any]) -> None:
        if self._open == kind:
            return
        self._close()
        self._open = kind
        self._event("content_block_start", index=self._blocks, content_block={"type": kind, **empty})
        self._blocks += 1

    def _delta(self, delta: Mapping[str, Any]) -> None:
        self._event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> None:
        if self._open == "thinking":
            self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            self._event("content_block_stop", index=self._blocks - 1)
            self._open = None

    def _event(self, kind: str, **fields: Any) -> None:
        self.write({"type": kind} | fields, kind)
