"""The methods of a class or protocol over a channel, as its annotations describe them: nothing of it is written again.

`Methods` decodes arguments and results; `proxy` stands for an object at the other end.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from palestra.errors import InvalidRequest
from palestra.process.channel import Remote
from palestra.process.codec import decode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Method:
    """A method whose arguments and results are sent.

    Attributes:
        signature: without `self`.
        arguments: the record of its arguments, in order.
        returns: annotation of the result, or of what it yields.
        streams: whether it is an asynchronous iterator.
    """

    signature: inspect.Signature
    arguments: type[msgspec.Struct]
    returns: Any
    streams: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Method:
        """Describe a function whose first parameter is `self`."""
        hints = get_type_hints(function)
        _, *parameters = inspect.signature(function).parameters.values()
        fields = [
            (one.name, hints[one.name]) if one.default is one.empty else (one.name, hints[one.name], one.default)
            for one in parameters
        ]
        arguments = msgspec.defstruct(function.__name__, fields, array_like=True, forbid_unknown_fields=True)
        streams = get_origin(hints["return"]) in (AsyncIterator, AsyncGenerator)
        returns = get_args(hints["return"])[0] if streams else hints["return"]
        return cls(inspect.Signature(parameters), arguments, returns, streams)

    def ordered(self, *given: Any, **named: Any) -> tuple[Any, ...]:
        """Return the arguments of a call in order, with the defaults."""
        bound = self.signature.bind(*given, **named)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def decoded(self, arguments: msgspec.Raw) -> tuple[Any, ...]:
        """Return the arguments that were sent.

        Raises:
            InvalidRequest: one is missing, or of another type.
        """
        return msgspec.structs.astuple(decode(self.arguments, arguments))


@cache
def method_of(kind: Any, name: str) -> Method:
    """Return a public method of a class or protocol.

    Raises:
        InvalidRequest: there is none.
    """
    function = None if name.startswith("_") else inspect.getattr_static(kind, name, None)
    if not inspect.isfunction(function):
        raise InvalidRequest(f"there is no method {name!r}")
    return Method.of(function)


def public_methods(kind: Any) -> Iterator[str]:
    """Yield the names of a protocol's methods."""
    return (name for name, found in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_"))


def proxy(protocol: type[T], remote: Remote, local: object) -> T:
    """Return an object that has the methods of a protocol.

    Args:
        local: implements the methods that are answered on this side; all others are called at the other end.
    """
    names = {name: None for name in public_methods(protocol)}
    methods = {name: getattr(local, name, None) or _called(protocol, name, remote) for name in names}
    return cast(T, type(protocol.__name__, (), {name: staticmethod(method) for name, method in methods.items()})())


def _called(protocol: Any, name: str, remote: Remote) -> Callable[..., Any]:
    """Return a function that calls a method at the other end."""
    method = method_of(protocol, name)

    async def call(*given: Any, **named: Any) -> Any:
        return decode(method.returns, await remote.call(name, *method.ordered(*given, **named)))

    async def stream(*given: Any, **named: Any) -> AsyncGenerator[Any, None]:
        pieces = remote.stream(name, *method.ordered(*given, **named))
        try:
            async for piece in pieces:
                yield decode(method.returns, piece)
        finally:
            await pieces.aclose()

    return stream if method.streams else call
