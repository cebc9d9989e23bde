"""Requests of agents: constraints of replies, and events while a reply is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from palestra.errors import GrammarRefused, InvalidRequest, UnsupportedField
from palestra.renderers import MessageDelta, NotInThisFormat, Renderer, ReplyForm
from palestra.renderers.base import Tools
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest

_MAX_CALLS = 8  # of one reply if calls are required: a small model would write calls until its token limit


class Constraint(NamedTuple):
    """The grammar that a reply has to match.

    Attributes:
        grammar: in a form that `llguidance` reads, not yet compiled; "": no constraint.
        field: the request's field with the constraint, for errors.
    """

    grammar: str
    field: str


UNCONSTRAINED = Constraint("", "response_format")


def constraint_of(call: GenerationRequest, renderer: Renderer) -> Constraint:
    """Return the constraint of a request. A constrained reply has no reasoning before it.

    With tools and a `response_schema`, the reply may be tool calls or an answer, depending on `tool_choice`.

    Raises:
        InvalidRequest: an unknown tool, or choices together with tools or a schema.
        GrammarRefused: the schema is nested too deeply.
        UnsupportedField: the model's format does not support constrained tool calls.
    """
    required = call.tool_choice == "required"
    if call.response_choices:
        if required or call.callable_tools or call.response_schema is not None:
            raise InvalidRequest("choices can't be had beside tools or a schema", "choices")
        return Constraint(renderer.grammar(ReplyForm(choices=call.response_choices)), "choices")
    field = "tool_choice" if required else "response_format"
    if not required and call.response_schema is None:
        return UNCONSTRAINED
    form = ReplyForm(
        tools=_callable(call) if required or call.callable_tools else (),
        most_calls=_MAX_CALLS if call.parallel_tool_calls and call.tool_name is None else 1,
        schema=None if required else call.response_schema,
    )
    try:
        return Constraint(renderer.grammar(form), field)
    except RecursionError:
        raise GrammarRefused(f"{field}: over the bound of a grammar: it is nested too deep", field) from None
    except NotInThisFormat:
        raise UnsupportedField(
            f"{field}: calls of tools can't be constrained in the format of this model; use tool_choice auto or none",
            field,
        ) from None


def _callable(call: GenerationRequest) -> Tools:
    """Return the tools that a constrained reply may call."""
    tools = call.tools
    if call.tool_name is not None:
        tools = tuple(tool for tool in tools if tool["function"]["name"] == call.tool_name)
    if not tools:
        named = "there are no tools" if call.tool_name is None else f"there is no tool {call.tool_name!r}"
        raise InvalidRequest(f"tool_choice: {named} in this request", "tool_choice")
    return tools


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPiece:
    """Newly sampled tokens, and the part of the message that became final; either may be empty."""

    delta: MessageDelta
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


class Listener(Protocol):
    """Follows each choice while it is sampled: `started` once, `sampled` any number of times, `finished` once.

    The pieces of a choice add up to its message and tokens. Methods run on the event loop and must return quickly.
    """

    def started(self, choice: int, chat: Chat) -> None:
        """Receive a choice before its first token: its prompt and sampling parameters are set, and its reply is not."""
        ...

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Receive the next piece of a choice's reply."""
        ...

    def finished(self, choice: int, chat: Chat) -> None:
        """Receive the whole call, after it was recorded."""
        ...


class Relay:
    """A listener that calls `note` with each choice before it is sampled, and forwards to another listener, with
    numbers of choices from `first` on.
    """

    def __init__(
        self, listener: Listener | None, first: int = 0, note: Callable[[Chat], None] = lambda chat: None
    ) -> None:
        self._listener, self._first, self._note = listener, first, note

    def started(self, choice: int, chat: Chat) -> None:
        """Note a choice, and forward it."""
        self._note(chat)
        if self._listener is not None:
            self._listener.started(self._first + choice, chat)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Forward a piece of a reply."""
        if self._listener is not None:
            self._listener.sampled(self._first + choice, piece)

    def finished(self, choice: int, chat: Chat) -> None:
        """Forward the end of a choice."""
        if self._listener is not None:
            self._listener.finished(self._first + choice, chat)
