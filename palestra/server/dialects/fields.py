"""Fields and headers of requests that several dialects have, with their limits, and the agent that a call is of."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from palestra.config import MAX_AGENT, is_agent_name
from palestra.errors import InvalidRequest
from palestra.http.bodies import UNSUPPORTED
from palestra.server.dialects.sent_pictures import chat_content
from palestra.session.registry import KEYED
from palestra.types.calls import LARGEST_BIAS, MOST_LISTED, SAMPLING_RANGES
from palestra.types.messages import ChatMessage, GenerationRequest, TextPart
from palestra.types.records import SOLE_AGENT
from palestra.types.values import field_schemas

AGENT_HEADER, STEP_HEADER = "x-palestra-agent", "x-palestra-step"
MAX_STEP = 1_000_000
AUXILIARY = "auxiliary"  # last part of the name of an agent whose calls are not part of the task
# The header of a subagent's id, and the header that only a subagent sends; "": the id itself is such a header.
ID_HEADERS: Mapping[str, str] = {"x-claude-code-agent-id": "", "x-session-id": "x-parent-session-id"}
# Beginnings of system messages for titles and the like, by harness: a task that begins so is not meant. Summaries that
# replace a long history are part of the task.
AUXILIARY_PROMPTS = (
    "Generate a concise, sentence-case title (",  # Claude Code
    "Generate a short kebab-case name (",  # Claude Code
    "You are a title generator. You output ONLY a thread title.",  # opencode
    "Summarize what was done in this conversation. Write like a pull request description",  # opencode
)
_LONGEST_ID = 40
_OTHERS = re.compile(r"[^\w.:-]")

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
SEED_BITS = 2**63 - 1
MOST_TOP_K = int(SAMPLING_RANGES["top_k"][1])
Count = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def call_fields(body: bytes, headers: Mapping[str, str], path: str) -> dict[str, Any]:
    """Return the dialect-independent fields of a `GenerationRequest`. `body`: of the request; with the path it
    identifies a retry.
    """
    key = headers.get("idempotency-key", "")
    digest = hashlib.blake2b(
        body, digest_size=16, person=path.encode()[-16:], key=_digest(key) if key else b""
    ).hexdigest()
    return {
        "agent": agent_of(headers) if AGENT_HEADER in headers else SOLE_AGENT,
        "time_step": time_step_of(headers) if STEP_HEADER in headers else None,
        "digest": f"{KEYED}{digest}" if key else digest,
        "retry": bool(key) or headers.get("x-stainless-retry-count", "0") not in ("", "0"),
    }


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()


def agent_of(headers: Mapping[str, str]) -> str:
    """Return the name of the calling agent; a subagent's starts with its parent's: `planner/search`."""
    name = headers.get(AGENT_HEADER, SOLE_AGENT)
    with contextlib.suppress(UnicodeError):  # headers arrive as Latin-1, and clients write UTF-8
        name = name.encode("latin-1").decode()
    if not is_agent_name(name):
        raise InvalidRequest(f"an agent's name has 1 to {MAX_AGENT} printable characters: {name!r}", AGENT_HEADER)
    return name


def caller_name(
    agent: str, call: GenerationRequest, headers: Mapping[str, str], ids: Mapping[str, str], prompts: Sequence[str]
) -> str:
    """Return the name of the agent of a call.

    Args:
        agent: the episode's, a seat's, or the one that the header `x-palestra-agent` names.
        headers: with names in lower case.
        ids: more headers of ids, as in `ID_HEADERS`.
        prompts: more beginnings, of system messages or last messages.

    Raises:
        InvalidRequest: the whole name is too long.
    """
    for header, required in ({**ID_HEADERS, **ids} if ids else ID_HEADERS).items():
        found = headers.get(header)
        if found and headers.get(required or header):
            agent = f"{agent}/{_OTHERS.sub('-', found)[:_LONGEST_ID]}"
            break
    if call.messages and not call.tools:
        first, last = call.messages[0], call.messages[-1]
        system = first.role in ("system", "developer")
        if (system and first.text.lstrip().startswith((*AUXILIARY_PROMPTS, *prompts))) or (
            prompts and last.role != "assistant" and last.text.lstrip().startswith(tuple(prompts))
        ):
            agent = f"{agent}/{AUXILIARY}"
    if len(agent) > MAX_AGENT:
        raise InvalidRequest(f"the name of an agent below others has more than {MAX_AGENT} characters", AGENT_HEADER)
    return agent


def time_step_of(headers: Mapping[str, str]) -> int | None:
    """Return the TimeStep of the call; None: the call is its own TimeStep."""
    step = headers.get(STEP_HEADER)
    if step is None:
        return None
    if not step.isascii() or not step.isdigit() or len(step) > len(str(MAX_STEP)) or int(step) > MAX_STEP:
        raise InvalidRequest(f"a TimeStep is a number from 0 to {MAX_STEP}: {step[:20]!r}", STEP_HEADER)
    return int(step)


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_PICTURES = ("image_url", "image")  # the second is Palestra's own, with a digest


def _known_content(message: dict[str, Any]) -> dict[str, Any]:
    """Refuse content other than text and pictures: to drop it silently would change the prompt."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    kinds = [part["type"] for part in parts if isinstance(part.get("type"), str) and part["type"] != "text"]
    found = [key for key in ("function_call", "audio") if message.get(key)]
    found += [f"content of type {kind!r}" for kind in kinds if kind not in _PICTURES]
    if found:
        raise PydanticCustomError(UNSUPPORTED, "{found} is not supported by this server", {"found": found[0]})
    return chat_content(message) if kinds else message


def _message(found: dict[str, Any]) -> ChatMessage:
    """Return a message whose fields are validated, but for its content."""
    content = found.get("content")
    if content.__class__ is str and "function_call" not in found and "audio" not in found:
        found["content"] = (TextPart(text=content),)
        return ChatMessage(**found)
    return ChatMessage.model_validate(_known_content(found))


class _FromChat:
    """Reads a message of a chat request; a validator before pydantic's would take twice the time."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        anything = core_schema.typed_dict_field(core_schema.any_schema(), required=False)
        fields = field_schemas(ChatMessage, handler) | dict.fromkeys(("content", "function_call", "audio"), anything)
        read = core_schema.no_info_after_validator_function(_message, core_schema.typed_dict_schema(fields))
        return core_schema.lax_or_strict_schema(read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        assert schema["type"] == "lax-or-strict"
        generator: GenerateJsonSchema = handler.generate_json_schema  # type: ignore[attr-defined]
        return generator.generate_inner(schema["strict_schema"])  # under the name of the type


def may_show_pictures(body: bytes) -> bool:
    """Return whether a body, in any dialect, may show a picture; the name of such a part may be written in escapes."""
    return b"image" in body or b"\\u" in body  # a pattern would take tens of milliseconds for a long body


Message = Annotated[ChatMessage, _FromChat()]
StopStrings = Annotated[
    tuple[StopString, ...],
    BeforeValidator(_listed, json_schema_input_type=StopString | tuple[StopString, ...]),
    Field(max_length=MAX_STOPS),
]


class StreamOptions(BaseModel):
    """Options of a streamed answer, in OpenAI's format."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: Flag | None = Field(None, description="Whether to send one more chunk at the end, with the usage.")


class SamplingFields(BaseModel):
    """Sampling parameters of `/v1/chat/completions` and `/v1/completions`, with vLLM's extensions."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(description="The policy's name, as the claim gave it.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES, strict=True)] | None = Field(
        None, description="Number of replies to sample; each is recorded as a call of its own."
    )
    max_tokens: Count | None = Field(None, description="Most tokens to sample; the job's own limit applies as well.")
    min_tokens: Annotated[int, Field(ge=0, lt=2**63, strict=True)] | None = Field(
        None, description="Fewest tokens to sample; not possible in training episodes."
    )
    temperature: Temperature | None = Field(
        None, description="Used in ad-hoc episodes only; elsewhere the job has its own (see `x-palestra-sampling`)."
    )
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = Field(
        None, description="Used in ad-hoc episodes only; elsewhere the job derives the seed."
    )
    top_p: Probability | None = Field(
        None, description="Below 1: refused or ignored in training episodes (see `server.unknown_fields`)."
    )
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOP_K, strict=True)] | None = Field(
        None, description="Above 0: not possible in training episodes."
    )
    presence_penalty: Penalty | None = Field(None, description="Not possible in training episodes.")
    frequency_penalty: Penalty | None = Field(None, description="Not possible in training episodes.")
    logit_bias: (
        Annotated[
            dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]],
            Field(max_length=MOST_LISTED),
        ]
        | None
    ) = Field(None, description="By token id; not possible in training episodes.")
    stop: StopStrings | None = Field(
        None,
        description=f"Text, or up to {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters, that end the reply and "
        "are not part of it.",
    )
    stop_token_ids: Annotated[tuple[Token, ...], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Token ids that end the reply and are not part of it."
    )
    stream: Flag | None = Field(None, description="Server-sent events, from the first text on.")
    stream_options: StreamOptions | None = Field(None, description="`include_usage`: usage in a last chunk.")
    return_token_ids: Flag | None = Field(
        None, description="Add `prompt_token_ids`, and `token_ids` to each choice: the exact tokens."
    )

    @property
    def usage_wanted(self) -> bool:
        """Return whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields of a `GenerationRequest`."""
        return {
            "choices": self.n or 1,
            "min_tokens": self.min_tokens or 0,
            "temperature": self.temperature,
            "seed": None if self.seed is None else self.seed & SEED_BITS,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(self.top_k or 0, 0),
            "stop": self.stop or (),
            "stop_ids": self.stop_token_ids or (),
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": tuple(sorted((self.logit_bias or {}).items())),
        }
