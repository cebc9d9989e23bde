"""What a dialect is: one wire format in front of a session, from a request's bytes to its answer's.

A dialect is one file with a `Dialect`, and one line in `dialects/__init__.py`. It knows neither HTTP nor sessions:
`gateway/generate.py` handles the requests of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import orjson
from pydantic import BaseModel

from palestra.http.errors import Failure, openai_error
from palestra.http.sse import encode_event
from palestra.schemas.records import Chat
from palestra.session import CallStart, GenerationRequest, PolicyRuntime, ReplyPiece

B = TypeVar("B", bound=BaseModel)
TopLogprobs = Sequence[Sequence[tuple[int, float]]]  # for each token (token, logprob) of the most probable


@dataclass(frozen=True, kw_only=True, slots=True)
class DialectRequest(Generic[B]):
    """A request body as its dialect has read it.

    Attributes:
        body: its fields.
        calls: what is to be sampled: one call for each prompt, all of one policy.
        stream: whether the answer is sent as events while it is sampled.
    """

    body: B
    calls: tuple[GenerationRequest, ...]
    stream: bool = False

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self.calls[0].policy


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The choices of a request as they are recorded.

    Attributes:
        chats: in the order of the calls, and of the choices of each.
        top: for each choice the most probable tokens at each place; empty where they were not asked for, or where the
            choice was recorded before: they are not stored.
    """

    chats: tuple[Chat, ...]
    top: Sequence[TopLogprobs]


class EventWriter(ABC):
    """Writes one answer as server-sent events while its choices are sampled.

    It is a `Listener` of all calls of the request: the choices of the second call are numbered after those of the
    first. What it writes is sent in pieces, as fast as the client takes it.
    """

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: Mapping[str, Any] | bytes, event: str | None = None) -> None:
        """Add an event.

        Args:
            data: JSON, or what is to be sent as it is.
            event: the event's type; None: the dialect's events have none.
        """
        self._written.append(encode_event(data if isinstance(data, bytes) else orjson.dumps(data), event))

    def take(self) -> bytes:
        """Return what was written since the last time."""
        written = b"".join(self._written)
        self._written.clear()
        return written

    @abstractmethod
    def started(self, choice: int, start: CallStart) -> None:
        """See `Listener`."""

    @abstractmethod
    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """See `Listener`."""

    @abstractmethod
    def finished(self, choice: int, chat: Chat) -> None:
        """See `Listener`."""

    def ended(self, chats: Sequence[Chat]) -> None:  # noqa: B027 - many formats have no such event
        """Write what comes after all choices, given as they are recorded."""

    def failed(self, body: Mapping[str, Any]) -> None:
        """Write that the answer can't be finished; `body` is the dialect's form of the error."""
        self.write(body)


class TokenCounter(ABC, Generic[B]):
    """The route of a dialect that counts the tokens of a prompt.

    Attributes:
        path: of the route.
        body: the model of its request bodies.
        description: of the route, for the API's reference.
    """

    path: ClassVar[str]
    body: type[B]
    description: ClassVar[str]

    @abstractmethod
    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[B]:
        """Return the request whose prompt is to be counted. See `Dialect.parse`."""

    @abstractmethod
    def render(self, tokens: int) -> Mapping[str, Any]:
        """Return the answer."""


class Dialect(ABC, Generic[B]):
    """One wire format. It has no state; what a request asks for travels in its `DialectRequest`.

    Attributes:
        path: of its route. Errors of all paths that begin with it have the dialect's form.
        body: the model of its request bodies.
        description: of the route, for the API's reference.
        counter: counts tokens, where the format has a route for that.
    """

    path: ClassVar[str]
    body: type[B]
    description: ClassVar[str]
    counter: TokenCounter[Any] | None = None

    @abstractmethod
    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[B]:
        """Read a request. It may run in any thread.

        Args:
            body: as it was sent.
            headers: of the request, by their names in lower case.

        Raises:
            InvalidRequest: not JSON, or a value that can't be used.
            UnsupportedField: a field that this server does not act on.
        """

    def check(self, request: DialectRequest[B], runtime: PolicyRuntime) -> None:
        """Refuse what the request's policy can't do.

        Raises:
            UnsupportedField: naming the field.
        """

    @abstractmethod
    def render(self, request: DialectRequest[B], result: GenerationResult, runtime: PolicyRuntime) -> Mapping[str, Any]:
        """Return the whole answer.

        Args:
            request: as `parse` made it.
            result: the choices.
            runtime: of the request's policy.
        """

    @abstractmethod
    def sse(self, request: DialectRequest[B], runtime: PolicyRuntime, created: float) -> EventWriter:
        """Return what writes the answer as events.

        Args:
            request: as `parse` made it.
            runtime: of the request's policy.
            created: when the request came, in Unix seconds.
        """

    def error_body(self, failure: Failure) -> dict[str, Any]:
        """Return the body of an error: in OpenAI's form, where the dialect has no other."""
        return openai_error(failure)
