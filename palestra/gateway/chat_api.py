"""`/v1/chat/completions` and `/v1/models`: OpenAI's dialect in front of a session."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.gateway.keys import bearer
from palestra.gateway.plane import DataPlane
from palestra.schemas.messages import ChatMessage
from palestra.schemas.records import Chat
from palestra.session import EpisodeSession, ModelCall

T = TypeVar("T")

SOLE_AGENT = "agent"
MAX_AGENT = 200
MAX_STEP = 1_000_000

# Fields that may be sent, with the values that ask for nothing we do not do.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "stream_options": (),
    "top_p": (1, 1.0),
    "top_logprobs": (0,),
    "stop": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)


def _only_text(message: Any) -> Any:
    """Refuse what a prompt would silently lack: the records have a place for images, the renderers not yet."""
    if isinstance(message, dict):
        content = message.get("content")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        kinds = [part["type"] for part in parts if isinstance(part.get("type"), str) and part["type"] != "text"]
        found = [key for key in ("function_call", "audio") if message.get(key)]
        found += [f"content of type {kind!r}" for kind in kinds]
        if found:
            raise PydanticCustomError("not_text", "{found} is not supported by this server", {"found": found[0]})
    return message


Message = Annotated[ChatMessage, BeforeValidator(_only_text)]


class FunctionSpec(BaseModel):
    """A tool's name, what it is for, and the JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class ToolSpec(BaseModel):
    """One tool that the model may call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    function: FunctionSpec


class ChatRequest(BaseModel):
    """The fields of OpenAI's chat request that this server acts on."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(description="The policy's name, as the claim gave it.")
    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=10_000)] = Field(
        description="The conversation so far; content is text, or a list of text parts."
    )
    max_tokens: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        None, description="Most tokens to sample; the job's own limit applies as well."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        None, description="The newer name of the same."
    )
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        None, description="Used on ad-hoc episodes only; elsewhere the job's, as `x-palestra-sampling` then says."
    )
    tools: Annotated[tuple[ToolSpec, ...], Field(max_length=1000)] | None = Field(
        None, description="What the model may call. Calls come back in `tool_calls`, unless `tool_choice` is none."
    )
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = Field(None, description="Likewise.")
    logprobs: bool | None = Field(None, description="Return the logprobs of the sampled tokens.")


class ModelInfo(BaseModel):
    """One policy."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "palestra"


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


def add_chat_routes(app: FastAPI, plane: DataPlane) -> None:
    """The routes that OpenAI clients call."""
    schema = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")

    @app.post(
        "/v1/chat/completions",
        tags=["model"],
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    )
    async def chat_completions(request: Request) -> Response:
        """Sample a reply. Needs the key of an episode; the call is recorded before it is answered."""
        key = plane.keys.require_episode(request)
        with plane.sessions.admitted():
            body = await request.body()
            call, wanted = parse_chat(body, request.headers)
            session = await plane.sessions.open(key.episode_id, key.fence)
            chat = await until_disconnect(request, session.chat(call))
        decode = plane.sessions.context.runtime(chat.policy).decode if wanted.logprobs else None
        return _ChatResponse(session, chat, completion(chat, decode), _overruled(chat, wanted))

    @app.get("/v1/models", tags=["model"])
    async def models(request: Request) -> ModelList:
        """The policies of this job. Any key of it will do."""
        plane.keys.check(bearer(request))
        created = int(plane.started_at)
        return ModelList(data=[ModelInfo(id=name, created=created) for name in plane.sessions.context.policies])


def parse_chat(body: bytes, headers: Any) -> tuple[ModelCall, ChatRequest]:
    """Check a request body.

    Raises:
        InvalidRequest: not JSON, or a value of the wrong type.
        UnsupportedField: something this server does not do yet.
    """
    try:
        wanted = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    for name, value in (wanted.model_extra or {}).items():
        if value is None or name in _IGNORED:
            continue
        if name not in _HARMLESS or value not in _HARMLESS[name]:
            raise UnsupportedField(f"{name} = {str(value)[:60]!r} is not supported by this server", name)
    call = ModelCall(
        policy=wanted.model,
        messages=wanted.messages,
        max_tokens=wanted.max_completion_tokens or wanted.max_tokens,
        temperature=wanted.temperature,
        seed=None if wanted.seed is None else wanted.seed & (2**63 - 1),
        tools=() if wanted.tools is None else tuple(tool.model_dump(exclude_unset=True) for tool in wanted.tools),
        parse_tool_calls=(wanted.model_extra or {}).get("tool_choice") != "none",
        agent=_agent(headers),
        time_step=_time_step(headers),
        digest=hashlib.blake2b(body, digest_size=16).hexdigest(),
        retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
    )
    return call, wanted


def _agent(headers: Mapping[str, str]) -> str:
    """Who calls; a subagent's name starts with its parent's: `planner/search`."""
    name = headers.get("x-palestra-agent", SOLE_AGENT)
    if not 0 < len(name) <= MAX_AGENT or not name.isprintable() or "" in name.split("/"):
        raise InvalidRequest(f"an agent's name has 1 to {MAX_AGENT} printable characters: {name!r}", "x-palestra-agent")
    return name


def _time_step(headers: Mapping[str, str]) -> int | None:
    """The interaction with the environment that the call belongs to; None: it is one of its own."""
    step = headers.get("x-palestra-step")
    if step is None:
        return None
    if not step.isascii() or not step.isdigit() or int(step) > MAX_STEP:
        raise InvalidRequest(f"a TimeStep is a number from 0 to {MAX_STEP}: {step[:20]!r}", "x-palestra-step")
    return int(step)


def _explain(error: ValidationError) -> InvalidRequest:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "not_text":
        return UnsupportedField(f"{place}: {first['msg']}", place)
    return InvalidRequest(
        f"{place}: {first['msg']}" if place else f"the body is not valid JSON: {first['msg']}", place or None
    )


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it if the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _overruled(chat: Chat, wanted: ChatRequest) -> str | None:
    """The header that says what the job fixed against the caller's wish."""
    used, notes = chat.sampling, []
    if wanted.temperature is not None and wanted.temperature != used.temperature:
        notes.append(f"temperature={used.temperature:g}")
    asked = wanted.max_completion_tokens or wanted.max_tokens
    if asked is not None and asked != used.max_tokens:
        notes.append(f"max_tokens={used.max_tokens}")
    if wanted.seed is not None and wanted.seed & (2**63 - 1) != used.seed:
        notes.append("seed=job")
    return ", ".join(notes) or None


class _ChatResponse(Response):
    """Tells the session when the last byte has left."""

    def __init__(self, session: EpisodeSession, chat: Chat, body: Mapping[str, Any], overruled: str | None) -> None:
        headers = {"x-palestra-sampling": overruled} if overruled else None
        super().__init__(orjson.dumps(body), 200, headers, "application/json")
        self._session, self._chat = session, chat

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        self._session.delivered(self._chat)


def _message(reply: ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning_content is not None:
        message["reasoning_content"] = reply.reasoning_content
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [call.model_dump() for call in reply.tool_calls]
    return message


def completion(chat: Chat, decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """OpenAI's `chat.completion` object; with logprobs where `decode`, from ids to text, is given."""
    prompt, sampled = chat.prompt_tokens, len(chat.completion_ids)
    choice: dict[str, Any] = {
        "index": 0,
        "message": _message(chat.reply),
        "finish_reason": "tool_calls" if chat.reply.tool_calls else chat.finish_reason,
        "logprobs": None,
    }
    if decode is not None:
        texts = [decode([token]) for token in chat.completion_ids.tolist()]
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, chat.logprobs.tolist(), strict=True)
            ],
            "refusal": None,
        }
    return {
        "id": f"chatcmpl-{chat.episode_id}-{chat.fence}-{chat.index}",
        "object": "chat.completion",
        "created": int(chat.finished_at),
        "model": chat.policy,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": chat.shared},
        },
        "system_fingerprint": f"version-{chat.versions[-1].version}",
    }
