"""The interface of a dialect: one wire format in front of a session, from a request's bytes to its answer's.

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
from palestra.server.dialects.sent_pictures import SentPicture
from palestra.session import CallStart, PolicyRuntime, ReplyPiece
from palestra.types.calls import Chat
from palestra.types.generation import GenerationRequest

B = TypeVar("B", bound=BaseModel)
TopLogprobs = Sequence[Sequence[tuple[int, float]]]  # for each place: (token, logprob) of its most probable tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class DialectRequest(Generic[B]):
    """A request body as its dialect has parsed it.

    Attributes:
        body: the fields of the body.
        calls: the calls to sample: one for each prompt, all of one policy.
        stream: whether the answer is sent as events while it is sampled.
        scored: whether the answer has the log-probabilities of the prompts' tokens.
        pictures: of the first call's messages, in order; `parse` leaves them out.
    """

    body: B
    calls: tuple[GenerationRequest, ...]
    stream: bool = False
    scored: bool = False
    pictures: tuple[SentPicture, ...] = ()

    @property
    def policy(self) -> str:
        """Return the name of the policy that the request calls."""
        return self.calls[0].policy

    @property
    def agent(self) -> str:
        """The name of the agent that calls."""
        return self.calls[0].agent

    def of_agent(self, name: str) -> DialectRequest[B]:
        """Return the request as another agent's."""
        return replace(self, calls=tuple(replace(call, agent=name) for call in self.calls))

    def of_policy(self, name: str) -> DialectRequest[B]:
        """Return the request as it is asked of another policy, which the role of its agent has.

        A retry of it is known by that policy, too: two agents may send the same body.
        """
        calls = tuple(replace(call, policy=name, digest=f"{call.digest}@{name}") for call in self.calls)
        return replace(self, calls=calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The choices of a request as they are recorded.

    Attributes:
        chats: the choices, in the order of the calls, then of each call's choices.
        top: for each choice the most probable tokens at each place. Empty if no call asked for them, or if the choice
            was recorded by an earlier request: they are not stored.
        prompt_logprobs: for each choice the log-probability of each token of its prompt but the first. Empty if the
            request does not ask for them.
    """

    chats: tuple[Chat, ...]
    top: Sequence[TopLogprobs]
    prompt_logprobs: Sequence[Sequence[float]] = ()


class EventWriter(ABC):
    """Writes one answer as server-sent events while its choices are sampled.

    A writer is a `Listener` of all calls of the request: the choices of the second call are numbered after those of the
    first. Its events are sent in pieces, as fast as the client reads them.
    """

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: Mapping[str, Any] | bytes, event: str | None = None) -> None:
        """Add an event to the pieces to send.

        Args:
            data: an object to send as JSON, or bytes to send as they are.
            event: the event's type; None: events of the dialect have no type.
        """
        self._written.append(encode_event(data if isinstance(data, bytes) else orjson.dumps(data), event))

    def take(self) -> bytes:
        """Return the events written since the last call, encoded."""
        written = b"".join(self._written)
        self._written.clear()
        return written

    @abstractmethod
    def started(self, choice: int, start: CallStart) -> None:
        """Write the events for the start of a choice. See `Listener`."""

    @abstractmethod
    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Write the events for a piece of a choice. See `Listener`."""

    @abstractmethod
    def finished(self, choice: int, chat: Chat) -> None:
        """Write the events for the end of a choice. See `Listener`."""

    def ended(self, chats: Sequence[Chat]) -> None:  # noqa: B027 - many formats have no such event
        """Write the events after the last choice. By default there are none."""

    def failed(self, body: Mapping[str, Any]) -> None:
        """Write that the answer can't be finished; `body` is the error in the dialect's form."""
        self.write(body)


class TokenCounter(ABC, Generic[B]):
    """The route of a dialect that counts the tokens of a prompt.

    Attributes:
        path: path of the route.
        body: model of its request bodies.
        description: text about the route in the API's reference.
    """

    path: ClassVar[str]
    body: type[B]
    description: ClassVar[str]

    @abstractmethod
    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[B]:
        """Return the request whose prompt is to be counted. See `Dialect.parse`."""

    @abstractmethod
    def render(self, tokens: int) -> Mapping[str, Any]:
        """Return the answer for a prompt of so many tokens."""


class Dialect(ABC, Generic[B]):
    """One wire format. A dialect has no state; the wishes of a request travel in its `DialectRequest`.

    Attributes:
        path: path of its route. Errors of all paths that begin with it have the dialect's form.
        body: model of its request bodies.
        description: text about the route in the API's reference.
        counter: counts tokens, if the format has a route for that.
    """

    path: ClassVar[str]
    body: type[B]
    description: ClassVar[str]
    counter: TokenCounter[Any] | None = None

    @abstractmethod
    def parse(self, body: bytes, headers: Mapping[str, str]) -> DialectRequest[B]:
        """Parse a request. May run in any thread.

        Args:
            headers: the request's headers, with names in lower case.

        Raises:
            InvalidRequest: the body is not JSON, or a value can't be used.
            UnsupportedField: the body has a field that this server does not act on.
        """

    def check(self, request: DialectRequest[B], runtime: PolicyRuntime) -> None:
        """Refuse wishes that the request's policy can't fulfil. By default there are none.

        Raises:
            UnsupportedField: names the field.
        """

    @abstractmethod
    def render(self, request: DialectRequest[B], result: GenerationResult, runtime: PolicyRuntime) -> Mapping[str, Any]:
        """Return the whole answer, as an object to send as JSON.

        Args:
            request: the request, as `parse` returned it.
        """

    @abstractmethod
    def sse(self, request: DialectRequest[B], runtime: PolicyRuntime, created: float) -> EventWriter:
        """Return a writer that writes the answer as events.

        Args:
            request: the request, as `parse` returned it.
            created: arrival of the request, in Unix seconds.
        """

    def error_body(self, failure: Failure) -> dict[str, Any]:
        """Return the body of an error; OpenAI's form, unless the dialect overrides it."""
        return openai_error(failure)
