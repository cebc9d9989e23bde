"""Remote calls of the methods of a class or protocol, derived from its annotations.

`proxy` represents the remote object, and `Server` executes the calls; `answer_of` executes one without an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from palestra.errors import InvalidRequest, PalestraError, TooManyRequests
from palestra.process.channel import Call, Cancel, Duplex, Failed, Message, Piece, Remote, Result, TakenBack, raw
from palestra.process.codec import SentError, decode
from palestra.waiting import cancelled

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Method:
    """The signature of a remote method.

    Attributes:
        hints: annotations of its parameters, by name.
        arguments: record of its arguments, in order.
        returns: annotation of the result, or of streamed items.
        streams: whether it is an asynchronous iterator.
    """

    signature: inspect.Signature
    hints: dict[str, Any]
    arguments: type[msgspec.Struct]
    returns: Any
    streams: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Method:
        """Return the signature of a function whose first parameter is `self`."""
        hints = get_type_hints(function)
        _, *parameters = inspect.signature(function).parameters.values()
        fields = [
            (one.name, hints[one.name]) if one.default is one.empty else (one.name, hints[one.name], one.default)
            for one in parameters
        ]
        arguments = msgspec.defstruct(function.__name__, fields, array_like=True, forbid_unknown_fields=True)
        streams = get_origin(hints["return"]) in (AsyncIterator, AsyncGenerator)
        returns = get_args(hints["return"])[0] if streams else hints["return"]
        given = {one.name: hints[one.name] for one in parameters}
        return cls(inspect.Signature(parameters), given, arguments, returns, streams)

    def ordered(self, *given: Any, **named: Any) -> tuple[Any, ...]:
        """Return the arguments of a call in order, with defaults."""
        bound = self.signature.bind(*given, **named)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def decoded(self, arguments: msgspec.Raw) -> tuple[Any, ...]:
        """Decode the arguments of a call."""
        return msgspec.structs.astuple(decode(self.arguments, arguments))


@cache
def method_of(kind: Any, name: str) -> Method:
    """Return the signature of a public method of a class or protocol."""
    classes = () if name.startswith("_") else getattr(kind, "__mro__", ())  # not its metaclass, which has `register`
    function = next((vars(one)[name] for one in classes if name in vars(one)), None)
    if not inspect.isfunction(function):
        raise InvalidRequest(f"there is no method {name!r}")
    return Method.of(function)


def proxy(protocol: type[T], remote: Remote, local: object, part: str = "") -> T:
    """Return an object that has the methods of a protocol. `local` implements the methods that are answered on this
    side; all others are called at the other end.
    """
    names = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")]
    methods = {name: getattr(local, name, None) or remote_method(protocol, name, remote, part) for name in names}
    return cast(T, type(protocol.__name__, (), {name: staticmethod(method) for name, method in methods.items()})())


def remote_method(protocol: Any, name: str, remote: Remote, part: str = "") -> Callable[..., Any]:
    """Return a function that calls a method at the other end; see `proxy`."""
    method, called = method_of(protocol, name), f"{part}.{name}" if part else name

    async def call(*given: Any, **named: Any) -> Any:
        return decode(method.returns, await remote.call(called, *method.ordered(*given, **named)))

    async def stream(*given: Any, **named: Any) -> AsyncGenerator[Any, None]:
        pieces = remote.stream(called, *method.ordered(*given, **named))
        try:
            async for piece in pieces:
                yield decode(method.returns, piece)
        finally:
            await pieces.aclose()

    return stream if method.streams else call


def answer_of(target: object, call: Call) -> Result | Failed:
    """Call a method of an object, and return the answer for the other end."""
    kind: Any = type(target)
    try:
        arguments = method_of(kind, call.method).decoded(call.arguments)
        return Result(call.id, raw(getattr(target, call.method)(*arguments)))
    except TakenBack as error:
        return Failed(call.id, None if error.problem is None else SentError.of(error.problem))
    except Exception as error:  # noqa: BLE001 - the caller has it
        trace = "" if isinstance(error, PalestraError) else traceback.format_exc()
        return Failed(call.id, SentError.of(error), trace)


class Server:
    """Executes the calls that arrive, all at the same time."""

    def __init__(
        self,
        channel: Duplex,
        parts: Mapping[str, tuple[Any, object]],
        sent: Callable[[Exception], Awaitable[Exception | None]],
        most_calls: int | None = None,
    ) -> None:
        """Prepare to serve.

        `parts` are protocols whose methods may be called, and what implements them: `save` of the part "trainer" is
        called as `trainer.save`, and those of the part "" by their names alone. `sent` returns the error that the
        caller gets for one that was raised; None: the caller gets no answer. A stranger has `most_calls` at the same
        time, has to read its answers, and sends nothing odd; None: the caller is this program's own.
        """
        self._channel, self._parts, self._sent, self._most = channel, parts, sent, most_calls
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._streams = set[int]()

    async def run(self) -> None:
        """Serve until the other side closes the channel; then cancel running calls. Those of a stranger, but for
        streams, end as if it were there. Raises InvalidRequest: a stranger has sent what is odd.
        """
        try:
            async for messages in self._channel.frames():
                for message in messages:
                    if self._most is not None:
                        await self._channel.drain()
                    self._take(message)
        finally:
            streams = [self._calls[number] for number in self._streams]
            await cancelled(*(self._calls.values() if self._most is None else streams))
            if self._calls:
                await asyncio.wait(self._calls.values())

    def _take(self, message: Message) -> None:
        match message:
            case Call(id=number) if number in self._calls:
                raise InvalidRequest(f"a call with the id {number} is being executed already")
            case Call(id=number) if self._most is not None and len(self._calls) >= self._most:
                busy = TooManyRequests(f"{self._most} calls of this job are being executed; send fewer")
                self._channel.send(Failed(number, SentError.of(busy)))
            case Call(id=number):
                task = self._calls[number] = asyncio.create_task(self._answer(message))
                task.add_done_callback(partial(self._forget, number))
                with contextlib.suppress(InvalidRequest):
                    if self._method(message)[1].streams:
                        self._streams.add(number)
            case Cancel(id=number):
                if number in self._streams:
                    self._calls[number].cancel()
            case _ if self._most is not None:
                raise InvalidRequest(f"a caller does not send {type(message).__name__}")

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        del self._calls[number]
        self._streams.discard(number)

    def _method(self, call: Call) -> tuple[Callable[..., Any], Method]:
        """Return what a call calls, and its signature."""
        part, _, name = call.method.rpartition(".")
        if part not in self._parts:
            raise InvalidRequest(f"there is no method {call.method!r}")
        protocol, target = self._parts[part]
        method = method_of(protocol, name)
        return getattr(target, name), method

    async def _answer(self, call: Call) -> None:
        try:
            function, method = self._method(call)
            found = function(*method.decoded(call.arguments))
            result = None
            if method.streams:
                async with contextlib.aclosing(found) as pieces:
                    async for piece in pieces:
                        self._channel.send(Piece(call.id, raw(piece)))
            else:
                result = await found
            self._channel.send(Result(call.id, raw(result)))
        except Exception as error:  # noqa: BLE001 - the caller has it
            if (answer := await self._sent(error)) is not None:
                self._channel.send(Failed(call.id, SentError.of(answer)))
