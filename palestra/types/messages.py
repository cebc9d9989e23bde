"""Chat messages in OpenAI's shape, and observations of agents; content is always a list of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, get_args

import msgspec
import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, WrapValidator

from palestra.types.values import Value, without_surrogates

if TYPE_CHECKING:
    from PIL.Image import Image


class Pictures(Protocol):
    """Pictures by the SHA-256 of their encoded bytes, in hex; thread-safe."""

    def size(self, digest: str) -> tuple[int, int]:
        """Return width and height of a picture, in pixels.

        Raises:
            PalestraError: no picture has this digest, or it cannot be decoded.
        """
        ...

    def image(self, digest: str) -> Image:
        """Return a decoded, upright picture, in RGB.

        Raises:
            PalestraError: see `size`.
        """
        ...


MAX_SCHEMA_BYTES = 65_536
MAX_TOOLS = 1000  # of one call
FunctionName = Annotated[str, Field(min_length=1, max_length=200)]


def _small(schema: Any) -> Any:
    try:
        size = len(orjson.dumps(schema))
    except TypeError as error:
        raise ValueError(str(error)) from None
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema of {size} bytes is over the limit of {MAX_SCHEMA_BYTES}")
    return schema


Schema = Annotated[dict[str, JsonValue], BeforeValidator(_small)]


class FunctionSpec(BaseModel):
    """A tool's name, its purpose, and the JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None


class ToolSpec(BaseModel):
    """A tool that the model may call, in OpenAI's form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    function: FunctionSpec


Text = Annotated[str, AfterValidator(without_surrogates)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
_ROLES = get_args(Role)
# required: the reply has to be tool calls; none: the reply is not searched for tool calls.
ToolChoice = Literal["auto", "none", "required"]
StepReward = float | Mapping[str, float | None]
"""A reward: one number, or several by name, of which None was not scored."""
MAX_NAMED = 32  # rewards of an episode by name


def _is_a(value: object, *kinds: type) -> bool:
    """Return whether code has given a value of the kind that its type says."""
    return isinstance(value, kinds)


class TextPart(Value, frozen=True, kw_only=True):
    """A piece of text in the content of a message, as the model reads it."""

    others: ClassVar[Literal["ignore", "forbid"]] = "forbid"

    type: Literal["text"] = "text"
    text: str

    def __post_init__(self) -> None:
        if self.text.__class__ is not str or not self.text.isascii():
            self.clean("text")


class ImagePart(Value, frozen=True, kw_only=True):
    """An image in the content of a message, named by the digest of its bytes (content addressing)."""

    others: ClassVar[Literal["ignore", "forbid"]] = "forbid"

    type: Literal["image"] = "image"
    # Only the digest is kept here: bytes in every record of a conversation would be stored again with each call.
    digest: Annotated[str, Field(description="sha256 of the encoded image, in hex.")]

    def __post_init__(self) -> None:
        if not _is_a(self.digest, str):
            self.check()


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Value, frozen=True, kw_only=True):
    """The name and the arguments with which the assistant calls a tool."""

    name: str
    arguments: Annotated[str, Field(description="JSON text of an object, as the model wrote it.")]

    def __post_init__(self) -> None:
        self.clean("name", "arguments")


class ToolCall(Value, frozen=True, kw_only=True):
    """One tool call of the assistant. A message with role `tool` and the same `id` answers it."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def __post_init__(self) -> None:
        if not _is_a(self.function, FunctionCall):
            self.check()
        self.clean("id")


def _parts(value: Any, validate: Callable[[Any], tuple[Part, ...]]) -> tuple[Part, ...]:
    """Turn a string into one text part, and None into no parts."""
    if isinstance(value, str):
        return (TextPart(text=value),)
    return () if value is None else validate(value)


def _calls(value: Any) -> Any:
    """Turn None, which some clients send, into no calls."""
    return () if value is None else value


def _no_parts() -> tuple[Part, ...]:
    return ()


Parts = Annotated[tuple[Part, ...], WrapValidator(_parts)]
ToolCalls = Annotated[tuple[ToolCall, ...], BeforeValidator(_calls)]


class ChatMessage(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation.

    Keys without content for the model (`refusal: null`, `annotations: []`) are dropped.

    Attributes:
        role: author of the message.
        content: text and images; a string becomes one text part, and None no content.
        name: the author's name, if the model's format supports it.
        reasoning_content: an assistant's reasoning before its answer.
        tool_calls: of an assistant's message.
        tool_call_id: of a tool's message: the id of the answered call.
    """

    role: Role
    content: Parts = msgspec.field(default_factory=_no_parts)  # a function, so that files have empty content too
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: ToolCalls = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        content, calls = self.content, self.tool_calls
        known = content.__class__ is tuple and calls.__class__ is tuple and self.role in _ROLES
        for part in content if known else ():
            known = known and (part.__class__ is TextPart or _is_a(part, TextPart, ImagePart))
        for call in calls if known else ():
            known = known and _is_a(call, ToolCall)
        if not known:
            self.check()
        if self.name is not None or self.reasoning_content is not None or self.tool_call_id is not None:
            texts = ("name", "reasoning_content", "tool_call_id")
            self.clean(*(name for name in texts if getattr(self, name) is not None))

    @property
    def text(self) -> str:
        """Return the text parts of the content, joined without a separator."""
        content = self.content
        if len(content) == 1 and isinstance(content[0], TextPart):  # by far the most messages
            return content[0].text
        return "".join(part.text for part in content if isinstance(part, TextPart))


def text_message(role: Role, text: str) -> ChatMessage:
    """Return a message whose content is one text part."""
    return ChatMessage(role=role, content=(TextPart(text=text),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An event in an environment that one agent answers with an action.

    Attributes:
        id: unique in the episode.
        parents: observations whose actions caused this one; (): the episode's start.
        agent: name of the agent; a subagent's starts with its parent's, as in "planner/search".
        content: messages to append to the agent's conversation.
        tools: tools that the agent may call, in OpenAI's shape.
        choices: the allowed actions, such as the legal moves of a game; (): any text.
        reward: for the actions that caused it: a number, or several by name. None, also in place of one of several: not
            scored, which differs from 0.
        terminated: the agent's part has ended, so it must not act.
        truncated: the agent's part was cut off, for example by a limit.
        observed_at: Unix seconds.
        info: for people; recorded with the episode, as text.
    """

    id: str
    parents: tuple[str, ...]
    agent: str
    content: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    choices: tuple[str, ...] = ()
    reward: StepReward | None = None
    terminated: bool = False
    truncated: bool = False
    observed_at: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Return whether the agent's part has ended or was cut off, so that it must not act."""
        return self.terminated or self.truncated

    @property
    def tool_outputs(self) -> dict[str, str]:
        """Return the results of the agent's tool calls, by call id: `{"tool_outputs": …}` for agents that expect a
        dict.
        """
        return {message.tool_call_id or "": message.text for message in self.content if message.role == "tool"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """Sampling parameters that a caller may choose, with the values that change nothing.

    Attributes:
        min_tokens: stop tokens cannot be sampled before.
        top_p: nucleus sampling; 1: all tokens.
        top_k: 0: all tokens.
        stop_ids: tokens that end the reply and are not part of it, in addition to the policy's own.
        presence_penalty: subtracted once from the logit of a token in the reply.
        frequency_penalty: subtracted once for each occurrence of a token in the reply.
        logit_bias: (token, summand of its logit).
        top_logprobs: number of most probable tokens to report at each position.
    """

    min_tokens: int = 0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest(SamplingOptions):
    """One request for samples: messages, or a prompt that is used unchanged, and how to sample.

    A dialect creates it from a request body. Values that the job fixes are applied later (`sampling_of`). Other
    attributes are those of `SamplingOptions`.

    Attributes:
        messages: the conversation; () with `prompt`.
        prompt: text or token ids instead of messages; None: there are messages.
        choices: number of samples; each is recorded as a Chat.
        max_tokens: None: the job's limit.
        thinking_budget: limit of the reasoning, in tokens; None: unlimited.
        temperature: used if the job does not fix it; None: the job's.
        seed: used if the job does not fix it; None: derived from the job's.
        stop: strings that end the reply and are not part of it.
        tool_choice: with `none`, text that looks like a tool call stays text.
        tool_name: with `required`: the tool to call; None: any.
        parallel_tool_calls: False: the reply ends with its first tool call.
        response_schema: JSON schema of the content; None: any content.
        response_choices: the allowed contents; (): any content.
        agent: the caller; a subagent's name starts with its parent's, as in "planner/search".
        time_step: TimeStep of the environment; None: every call is its own TimeStep.
        digest: of the request body, to recognise a retry.
        retry: whether the client marks the request as a retry.
    """

    policy: str
    messages: tuple[ChatMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    choices: int = 1
    max_tokens: int | None = None
    thinking_budget: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    response_schema: dict[str, Any] | None = None
    response_choices: tuple[str, ...] = ()
    agent: str = "agent"
    time_step: int | None = None
    digest: str = ""
    retry: bool = False

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """Return the tools whose calls are parsed in the reply."""
        return () if self.tool_choice == "none" else self.tools

    def choice_digest(self, choice: int) -> str:
        """Return the digest of a choice, by index, to recognise a retry."""
        return self.digest if choice == 0 else f"{self.digest}.{choice}"
