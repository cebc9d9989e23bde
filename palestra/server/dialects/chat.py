"""OpenAI's chat completions, `/v1/chat/completions`: whole, or in chunks that add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from palestra.errors import InvalidRequest
from palestra.http.bodies import parse_body
from palestra.renderers import MessageDelta
from palestra.server.dialects.answers import (
    TokenBytes,
    answer_id,
    chat_logprobs,
    fingerprint,
    usage_of,
)
from palestra.server.dialects.base import Dialect, DialectRequest, EventWriter
from palestra.server.dialects.fields import (
    Count,
    Flag,
    Message,
    SamplingFields,
    call_fields,
    may_show_pictures,
)
from palestra.server.dialects.others import NO_OTHERS, other_fields
from palestra.server.dialects.sent_pictures import with_places
from palestra.session import PolicyRuntime, ReplyPiece
from palestra.types.calls import Chat
from palestra.types.messages import MAX_TOOLS, FunctionName, GenerationRequest, Schema, ToolSpec

# Fields that this server does not act on, with the values that ask for its own behaviour and are accepted.
_HARMLESS: dict[str, tuple[Any, ...]] = {"functions": ([],), "modalities": (["text"],)}
_UNUSED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_CALLS = "tool_calls"  # the finish reason of a complete reply with calls
_WISHES = ("reasoning_effort", "verbosity", "prediction")


class NamedFunction(BaseModel):
    """A tool's name, in OpenAI's format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: FunctionName


class NamedTool(BaseModel):
    """The one tool that has to be called."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(BaseModel):
    """A JSON schema with an optional name, in OpenAI's format."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]


class ResponseFormat(BaseModel):
    """The required format of the reply's content: any text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def schema_wanted(self) -> dict[str, Any] | None:
        """Return the JSON schema that the content must match, or None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise InvalidRequest("response_format.json_schema is missing", "response_format")
        return dict(self.json_schema.schema_)


class StructuredOutputs(BaseModel):
    """vLLM's constraints beyond OpenAI's `response_format`: one of several texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    choice: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...], Field(min_length=1, max_length=1024)
    ]


class ChatRequest(SamplingFields):
    """The fields of OpenAI's chat request that this server supports."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=10_000)] = Field(
        description="The conversation so far; content is text, or a list of parts: text, `image_url`, or `image` with "
        "the digest of a picture that was uploaded."
    )
    max_completion_tokens: Count | None = Field(None, description="The newer name of `max_tokens`.")
    tools: Annotated[tuple[ToolSpec, ...], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="Tools that the model may call. Calls come back in `tool_calls`, unless `tool_choice` is none.",
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="Required, or a tool's name: the reply is constrained to calls."
    )
    parallel_tool_calls: Flag | None = Field(
        None, description="False: the reply ends with its first call, as at a stop string."
    )
    response_format: ResponseFormat | None = Field(
        None,
        description="`json_object` or `json_schema`: the reply is constrained to it, without reasoning.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="`choice`: the reply is one of these texts, without reasoning, as in vLLM; not beside tools."
    )
    logprobs: Flag | None = Field(None, description="Return the logprobs of the sampled tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        None, description="With `logprobs`: number of most probable tokens to return at each place."
    )


class ChatCompletions(Dialect[ChatRequest]):
    """The dialect of OpenAI's chat completions, used by most clients and agent frameworks."""

    path = "/v1/chat/completions"
    body = ChatRequest
    description = """Sample replies. Needs the key of an episode; each is recorded before it is answered.

Where the job serves a model, this route and the other dialects need the job's key, and nothing is recorded.

Streamed, a tool call comes when it is complete: a chunk with its name, then one with its arguments. For models
whose format only the `renderers` package reads, the message comes when it is complete. `reasoning_content` is
what a reply has in `<think>`. A stop string is looked for in the reply as the model wrote it, tags included."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[ChatRequest]:
        """Parse a request into one call. See `Dialect.parse`."""
        wanted = parse_body(ChatRequest, body)
        others = other_fields(wanted, _UNUSED, _HARMLESS, _WISHES) if wanted.model_extra else NO_OTHERS
        if wanted.top_logprobs and not wanted.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs = true", "top_logprobs")
        choice = wanted.tool_choice
        named = choice.function.name if isinstance(choice, NamedTool) else None
        call = GenerationRequest(
            policy=wanted.model,
            messages=with_places(wanted.messages) if may_show_pictures(body) else wanted.messages,
            max_tokens=wanted.max_completion_tokens or wanted.max_tokens,
            top_logprobs=wanted.top_logprobs or 0,
            tools=() if wanted.tools is None else tuple(tool.model_dump(exclude_unset=True) for tool in wanted.tools),
            tool_choice="required" if isinstance(choice, NamedTool) else choice or "auto",
            tool_name=named,
            parallel_tool_calls=wanted.parallel_tool_calls is not False,
            response_schema=None if wanted.response_format is None else wanted.response_format.schema_wanted(),
            response_choices=() if wanted.structured_outputs is None else wanted.structured_outputs.choice,
            **wanted.sampling(),
            **call_fields(body, headers, self.path),
        )
        return DialectRequest(body=wanted, calls=(call,), stream=bool(wanted.stream), others=others)

    def render(
        self, request: DialectRequest[ChatRequest], chats: Sequence[Chat], runtime: PolicyRuntime
    ) -> dict[str, Any]:
        """Return the `chat.completion` object of the recorded choices."""
        return_ids = bool(request.body.return_token_ids)
        bytes_of, with_logprobs = runtime.renderer.vocabulary.bytes_of, bool(request.body.logprobs)
        first, choices = chats[0], []
        for number, chat in enumerate(chats):
            reply = chat.reply
            message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
            if reply.reasoning_content is not None:
                message["reasoning_content"] = reply.reasoning_content
            if reply.tool_calls:
                message["content"] = reply.text or None
                message["tool_calls"] = [call.model_dump() for call in reply.tool_calls]
            choice: dict[str, Any] = {
                "index": number,
                "message": message,
                "finish_reason": _CALLS if reply.tool_calls and chat.finish_reason == "stop" else chat.finish_reason,
                "logprobs": None,
            }
            if with_logprobs:
                ids, logprobs = chat.completion_ids.tolist(), chat.logprobs.tolist()
                top = () if chat.top is None else chat.top.rows()
                choice["logprobs"] = chat_logprobs(ids, logprobs, top, bytes_of)
            if return_ids:
                choice["token_ids"] = chat.completion_ids.tolist()
            choices.append(choice)
        return {
            "id": answer_id("chatcmpl", first),
            "object": "chat.completion",
            "created": int(first.finished_at),
            "model": first.policy,
            "choices": choices,
            "usage": usage_of(chats, len(choices), bytes_of),
            "system_fingerprint": fingerprint(chats),
            **({"prompt_token_ids": first.prompt_ids.tolist()} if return_ids else {}),
        }

    def sse(self, request: DialectRequest[ChatRequest], runtime: PolicyRuntime, created: float) -> EventWriter:
        """Return the writer of `chat.completion.chunk` events."""
        return _ChatChunks(request.body, runtime, created)


class _ChatChunks(EventWriter):
    """Writes `chat.completion.chunk` events, and `[DONE]` at the end."""

    def __init__(self, wanted: ChatRequest, runtime: PolicyRuntime, created: float) -> None:
        super().__init__()
        self._token_bytes = runtime.renderer.vocabulary.bytes_of
        self._bytes_of: TokenBytes | None = runtime.renderer.vocabulary.bytes_of if wanted.logprobs else None
        self._ids, self._usage = bool(wanted.return_token_ids), wanted.usage_wanted
        self._head: dict[str, Any] = {"id": "", "object": "chat.completion.chunk", "created": int(created)}
        self._head |= {"model": runtime.name, "system_fingerprint": None}
        self._prompt: list[int] | None = None  # prompt ids to send with the next chunk
        self._said: dict[int, set[str]] = {}  # by choice: fields of its message that were sent
        self._calls: dict[int, int] = {}  # by choice: number of tool calls so far

    def started(self, choice: int, chat: Chat) -> None:
        """Name the answer after its first call and prepare the choice. See `Listener`."""
        if not self._head["id"]:
            self._head["id"] = answer_id("chatcmpl", chat)
            self._prompt = chat.prompt_ids.tolist() if self._ids else None
        self._said[choice], self._calls[choice] = set(), 0

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Write chunks with the new parts of the message; the first has logprobs and token ids if asked for."""
        more: dict[str, Any] = {"logprobs": None}
        if self._bytes_of is not None and piece.ids:
            more["logprobs"] = chat_logprobs(piece.ids, piece.logprobs, piece.top, self._bytes_of)
        if self._ids:
            more["token_ids"] = list(piece.ids)
        deltas, said = self._deltas(choice, piece.delta), self._said[choice]
        if not deltas and (more["logprobs"] is not None or more.get("token_ids")):
            deltas = [{}]
        if deltas and not said:
            deltas[0] = {"role": "assistant"} | deltas[0]
        for delta in deltas:
            self._chunk(choice, delta, None, more)
            said.update(delta)
            more = {"logprobs": None}

    def finished(self, choice: int, chat: Chat) -> None:
        """Write the choice's last chunk, with the finish reason."""
        delta: dict[str, Any] = {}
        if not self._said[choice]:
            delta["role"] = "assistant"
        if "content" not in self._said[choice] and not chat.reply.tool_calls:
            delta["content"] = ""
        self._head["system_fingerprint"] = fingerprint([chat])
        reason = _CALLS if chat.reply.tool_calls and chat.finish_reason == "stop" else chat.finish_reason
        self._chunk(choice, delta, reason, {"logprobs": None})

    def ended(self, chats: Sequence[Chat]) -> None:
        """Write the chunk with the usage, if it was asked for, and `[DONE]`."""
        if self._usage:
            self.write(self._head | {"choices": [], "usage": usage_of(chats, len(chats), self._token_bytes)})
        self.write(b"[DONE]")

    def _deltas(self, choice: int, added: MessageDelta) -> list[dict[str, Any]]:
        """Return the deltas of a message part, each with one kind of content, like OpenAI.

        A call has two deltas: everything but its arguments, then its arguments. Clients lose calls that share a delta.
        """
        deltas: list[dict[str, Any]] = []
        if added.reasoning:
            deltas.append({"reasoning_content": added.reasoning})
        if added.content:
            deltas.append({"content": added.content})
        for call in added.calls:
            index, function = self._calls[choice], call.function
            named = call.model_dump() | {"function": {"name": function.name, "arguments": ""}}
            deltas.append({"tool_calls": [{"index": index} | named]})
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": function.arguments}}]})
            self._calls[choice] += 1
        return deltas

    def _chunk(self, choice: int, delta: dict[str, Any], finish_reason: str | None, more: dict[str, Any]) -> None:
        entry = {"index": choice, "delta": delta, "finish_reason": finish_reason} | more
        chunk = self._head | {"choices": [entry]}
        if self._usage:
            chunk["usage"] = None
        if self._prompt is not None:
            chunk["prompt_token_ids"], self._prompt = self._prompt, None
        self.write(chunk)
