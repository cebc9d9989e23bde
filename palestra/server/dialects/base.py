"""The interface of a dialect: one wire format of model calls, from the request's bytes to the answer's.

A dialect is one file with a `Dialect`, and one line in `dialects/__init__.py`. It knows neither HTTP nor sessions:
`server/generate.py` handles the requests of all dialects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import orjson
from pydantic import BaseModel

from palestra.http.errors import Failure, openai_error
from palestra.http.sse import encode_event
from palestra.server.dialects.others import NO_OTHERS, OtherFields
from palestra.session import PolicyRuntime, ReplyPiece
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest

B = TypeVar("B", bound=BaseModel)


@dataclass(kw_only=True, slots=True)
class DialectRequest(Generic[B]):
    """A parsed request body, filled on its way to the answer.

    Attributes:
        calls: to sample, one for each prompt, all of one policy.
        stream: whether the answer is sent as events during sampling.
        scores: for each choice, the logprobs of its prompt's tokens except the first, once they are known; None: they
            are not asked for.
        must_reason: whether it is refused by a model that does not reason.
        others: fields that the dialect does not act on; the server refuses or counts them.
    """

    body: B
    calls: tuple[GenerationRequest, ...]
    stream: bool = False
    scores: Sequence[Sequence[float]] | None = None
    must_reason: bool = False
    others: OtherFields = NO_OTHERS

    def set_caller(self, agent: str, policy: str) -> None:
        """Set the agent of all calls, and the policy of its role.

        Another policy is part of a retry's identity, too: two agents may send the same body.
        """
        named = "" if policy == self.calls[0].policy else f"@{policy}"
        self.calls = tuple(
            replace(call, agent=agent, policy=policy, digest=f"{call.digest}{named}") for call in self.calls
        )


class EventWriter(ABC):
    """Writes one answer as server-sent events during sampling.

    A writer is a `Listener` of all calls of the request, whose choices are numbered consecutively. Events are sent as
    fast as the client reads.
    """

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: Mapping[str, Any] | bytes, event: str | None = None) -> None:
        """Add an event.

        Args:
            data: an object to send as JSON, or bytes to send unchanged.
            event: type of the event; None: the dialect has no event types.
        """
        self._written.append(encode_event(data if isinstance(data, bytes) else orjson.dumps(data), event))

    def take(self) -> bytes:
        """Return the encoded events since the last call."""
        written = b"".join(self._written)
        self._written.clear()
        return written

    @abstractmethod
    def started(self, choice: int, chat: Chat) -> None:
        """Write the events for the start of a choice. See `Listener`."""

    @abstractmethod
    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Write the events for a piece of a choice. See `Listener`."""

    @abstractmethod
    def finished(self, choice: int, chat: Chat) -> None:
        """Write the events for the end of a choice. See `Listener`."""

    def ended(self, chats: Sequence[Chat]) -> None:  # noqa: B027 - many formats have no such event
        """Write the events after the last choice; none by default."""

    def failed(self, body: Mapping[str, Any]) -> None:
        """Write an error that ends the answer; `body` has the dialect's format."""
        self.write(body)


class TokenCounter(ABC, Generic[B]):
    """A dialect's route for counting the tokens of a prompt.

    Attributes:
        path: of the route.
        body: model of request bodies.
        description: for the API reference.
    """

    path: ClassVar[str]
    body: type[B]
    description: ClassVar[str]

    @abstractmethod
    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[B]:
        """Parse a request for counting. See `Dialect.parse`."""

    @abstractmethod
    def render(self, tokens: int) -> Mapping[str, Any]:
        """Return the answer for a number of tokens."""


class Dialect(ABC, Generic[B]):
    """One wire format, without state.

    Attributes:
        path: of its route; errors of all paths with this prefix have the dialect's format.
        body: model of request bodies.
        description: for the API reference.
        counter: counts tokens, if the format has a route for that.
    """

    path: ClassVar[str]
    body: type[B]
    description: ClassVar[str]
    counter: TokenCounter[Any] | None = None

    @abstractmethod
    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[B]:
        """Parse a request. Thread-safe.

        Args:
            headers: with names in lower case.

        Raises:
            InvalidRequest: the body is not JSON, or a value is invalid.
            UnsupportedField: a field changes what is sampled, and this server does not support it.
        """

    @abstractmethod
    def render(self, request: DialectRequest[B], chats: Sequence[Chat], runtime: PolicyRuntime) -> Mapping[str, Any]:
        """Return the whole answer, as an object to send as JSON. `chats` are the recorded choices, in the order of the
        calls.
        """

    @abstractmethod
    def sse(self, request: DialectRequest[B], runtime: PolicyRuntime, created: float) -> EventWriter:
        """Return a writer of the answer's events.

        Args:
            created: arrival of the request, in Unix seconds.
        """

    def error_body(self, failure: Failure) -> dict[str, Any]:
        """Return the body of an error; OpenAI's format, unless overridden."""
        return openai_error(failure)
