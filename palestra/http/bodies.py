"""Request bodies: read after the key, bounded in what they contain, and parsed away from the event loop if long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.http.disconnects import until_disconnect
from palestra.threads import WorkPool

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

UNSUPPORTED = "unsupported"  # type of the validation errors that say what this server does not do
LONG_BODY = 32_768  # bytes; parsing more takes the event loop longer than handing it to a thread
# Of one body. The largest that a route can use has 10,000 messages of parts, or the token ids of 128 prompts.
MAX_CONTAINERS, MAX_VALUES = 50_000, 1_000_000
MAX_KEYS = 100_000  # each is made into a string; 10,000 messages with calls and their results have 65,000
_BACKSLASH = ord("\\")


def parse_body(kind: type[B], body: bytes) -> B:
    """Parse and check a request body.

    Args:
        kind: the model of the body.
        body: JSON.

    Raises:
        InvalidRequest: not JSON, a value of the wrong type, or too many values.
        UnsupportedField: a value that a validator of `kind` refused as `UNSUPPORTED`.
    """
    check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


def check_size(body: bytes) -> None:
    """Refuse a body of so many values that reading it would hold the interpreter's lock for long.

    Values within strings count as well, where there are not many more than the limits: text is prose, code or JSON.

    Raises:
        InvalidRequest: there are too many objects and lists, too many keys, or too many values.
    """
    if _count(body, b"[{") > MAX_CONTAINERS and _outside_strings(body, b"[{", MAX_CONTAINERS) > MAX_CONTAINERS:
        raise InvalidRequest(f"the body has more than {MAX_CONTAINERS} objects and lists")
    if _count(body, b":") > MAX_KEYS and _outside_strings(body, b":", MAX_KEYS) > MAX_KEYS:
        raise InvalidRequest(f"the body has more than {MAX_KEYS} keys")
    if _count(body, b",") > MAX_VALUES and _outside_strings(body, b",", MAX_VALUES) > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES} values")


def _count(body: bytes, kinds: bytes, start: int = 0, end: int | None = None) -> int:
    return sum(body.count(kind, start, len(body) if end is None else end) for kind in kinds)


def _outside_strings(body: bytes, kinds: bytes, limit: int) -> int:
    """Return how many bytes of these kinds stand outside of JSON strings; or a number over `limit`."""
    found, at = 0, 0
    while found <= limit:
        opening = body.find(b'"', at)
        if opening < 0:
            return found + _count(body, kinds, at)
        found += _count(body, kinds, at, opening)
        at = _end_of_string(body, opening + 1)
    return found


def _end_of_string(body: bytes, at: int) -> int:
    """Return the index behind the quote that ends the string which `at` is in."""
    while True:
        closing = body.find(b'"', at)
        if closing < 0:
            return len(body)
        before = closing
        while before > at and body[before - 1] == _BACKSLASH:
            before -= 1
        if (closing - before) % 2 == 0:
            return closing + 1
        at = closing + 1


async def read_request(kind: type[B], request: Request, pool: WorkPool) -> B:
    """Read the body of a request, and check it.

    Args:
        kind: the model of the body.
        request: its body is not read yet.
        pool: threads for long bodies.

    Raises:
        InvalidRequest, UnsupportedField: see `parse_body`.
        ClientDisconnect: the client has gone.
    """
    return await read_with(partial(parse_body, kind), request, pool)


async def read_with(parse: Callable[[bytes], T], request: Request, pool: WorkPool) -> T:
    """Read the body of a request, and return what `parse` makes of it.

    Args:
        parse: may raise; called in a thread of `pool` where the body is long.
        request: its body is not read yet.
        pool: threads for long bodies.

    Raises:
        ClientDisconnect: the client has gone.
    """
    body = await request.body()
    if len(body) < LONG_BODY:
        return parse(body)
    return await until_disconnect(request.receive, pool.run(parse, body))


def _explain(error: ValidationError) -> InvalidRequest:
    """Return the first thing that is wrong, with its place in the body."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(takewhile(_is_key, map(str, first["loc"])))[:200]
    if first["type"] == UNSUPPORTED:
        return UnsupportedField(f"{place}: {first['msg']}", place)
    return InvalidRequest(
        f"{place}: {first['msg']}" if place else f"the body is not valid JSON: {first['msg']}", place or None
    )


def _is_key(part: str) -> bool:
    """Return False for the name of a type, which pydantic adds to a place where several are possible."""
    return "[" not in part and "(" not in part
