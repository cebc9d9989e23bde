"""`/v1/chat/completions` and `/v1/models`: OpenAI's dialect in front of a session."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import InvalidRequest
from palestra.gateway.answering import answer
from palestra.gateway.bodies import parse_aside, read_body
from palestra.gateway.callers import caller_of
from palestra.gateway.chat_answers import ChatStream, completion
from palestra.gateway.fields import (
    Count,
    Flag,
    FunctionName,
    Message,
    SamplingFields,
    Schema,
    ToolSpec,
    call_fields,
    refuse_others,
)
from palestra.gateway.keys import bearer
from palestra.gateway.openapi import request_schema
from palestra.gateway.plane import DataPlane
from palestra.session import GenerationRequest

# Fields that may be sent, with the values that ask for nothing we do not do.
_HARMLESS: dict[str, tuple[Any, ...]] = {"functions": ([],), "modalities": (["text"],)}
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)


class NamedFunction(BaseModel):
    """A tool by its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: FunctionName


class NamedTool(BaseModel):
    """The one tool that has to be called."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(BaseModel):
    """A JSON schema."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]


class ResponseFormat(BaseModel):
    """What the content has to be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def schema_wanted(self) -> dict[str, Any] | None:
        """The schema; None: any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise InvalidRequest("response_format.json_schema is missing", "response_format")
        return dict(self.json_schema.schema_)


class ChatRequest(SamplingFields):
    """The fields of OpenAI's chat request that this server acts on."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=10_000)] = Field(
        description="The conversation so far; content is text, or a list of text parts."
    )
    max_completion_tokens: Count | None = Field(None, description="The newer name of `max_tokens`.")
    tools: Annotated[tuple[ToolSpec, ...], Field(max_length=1000)] | None = Field(
        None, description="What the model may call. Calls come back in `tool_calls`, unless `tool_choice` is none."
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
    logprobs: Flag | None = Field(None, description="Return the logprobs of the sampled tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        None, description="With `logprobs`: so many of the most probable tokens at each place, too."
    )


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

    @app.post("/v1/chat/completions", tags=["model"], openapi_extra=request_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Sample replies. Needs the key of an episode; each is recorded before it is answered.

        Where the job serves a model, this route and the other dialects need the job's key, and nothing is recorded.

        Streamed, a tool call comes in one piece when it is complete; for models whose format only the `renderers`
        package reads, the message comes in one piece when it is. `reasoning_content` is what a reply has in
        `<think>`. A stop string is looked for in the reply as the model wrote it, tags included.
        """
        session_of = caller_of(plane, request)
        call, wanted = await parse_aside(partial(parse_chat, request), request, plane.pool)
        bytes_of = plane.sessions.context.runtime(call.policy).token_bytes
        shown = bytes_of if wanted.logprobs else None
        ids = bool(wanted.return_token_ids)
        writer = None
        if wanted.stream:
            usage = wanted.stream_options is not None and bool(wanted.stream_options.include_usage)
            writer = ChatStream(call.policy, plane.store.clock.now(), shown, ids, usage)
        return await answer(request, plane, session_of, [call], lambda played: completion(played, shown, ids), writer)

    @app.get("/v1/models", tags=["model"])
    async def models(request: Request) -> ModelList:
        """The policies of this job. Any key of it will do."""
        plane.keys.check(bearer(request))
        created = int(plane.started_at)
        return ModelList(data=[ModelInfo(id=name, created=created) for name in plane.sessions.context.policies])


def parse_chat(request: Request, body: bytes) -> tuple[GenerationRequest, ChatRequest]:
    """Check a request body.

    Raises:
        InvalidRequest: not JSON, or a value of the wrong type.
        UnsupportedField: something this server does not do.
    """
    wanted = read_body(ChatRequest, body)
    refuse_others(wanted, _IGNORED, _HARMLESS)
    if wanted.top_logprobs and not wanted.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true", "top_logprobs")
    choice = wanted.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    call = GenerationRequest(
        policy=wanted.model,
        messages=wanted.messages,
        max_tokens=wanted.max_completion_tokens or wanted.max_tokens,
        top_logprobs=wanted.top_logprobs or 0,
        tools=() if wanted.tools is None else tuple(tool.model_dump(exclude_unset=True) for tool in wanted.tools),
        tool_choice="required" if isinstance(choice, NamedTool) else choice or "auto",
        tool_name=named,
        parallel_tool_calls=wanted.parallel_tool_calls is not False,
        response_schema=None if wanted.response_format is None else wanted.response_format.schema_wanted(),
        **wanted.sampling(),
        **call_fields(body, request),
    )
    return call, wanted
