"""Request bodies: read after the key, bounded in what they contain, and parsed away from the event loop if long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import takewhile
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.threads import WorkPool

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

LONG_BODY = 32_768  # bytes; reading more takes the event loop longer than handing it to a thread
# Of one body. The largest that a route can use has 10,000 messages of parts, or the token ids of 128 prompts.
MAX_CONTAINERS, MAX_VALUES = 50_000, 1_000_000
_BACKSLASH = ord("\\")


def read_body(kind: type[B], body: bytes) -> B:
    """Check a request body.

    Raises:
        InvalidRequest: not JSON, a value of the wrong type, or too many values.
        UnsupportedField: content that is not text.
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
        InvalidRequest: there are too many objects and lists, or too many values.
    """
    if _count(body, b"[{") > MAX_CONTAINERS and _outside_strings(body, b"[{", MAX_CONTAINERS) > MAX_CONTAINERS:
        raise InvalidRequest(f"the body has more than {MAX_CONTAINERS} objects and lists")
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

    Raises:
        InvalidRequest, UnsupportedField: see `read_body`.
        ClientDisconnect: the client has gone.
    """
    return await parse_aside(partial(read_body, kind), request, pool)


async def parse_aside(parse: Callable[[bytes], T], request: Request, pool: WorkPool) -> T:
    """Read the body of a request, and return what `parse` makes of it; of a long one in a thread of `pool`.

    Raises:
        ClientDisconnect: the client has gone.
    """
    body = await request.body()
    if len(body) < LONG_BODY:
        return parse(body)
    return await until_disconnect(request, pool.run(parse, body))


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it if the client goes away.

    Raises:
        ClientDisconnect: the client went away before `work` was done.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _explain(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(takewhile(_is_key, map(str, first["loc"])))[:200]
    if first["type"] == "not_text":
        return UnsupportedField(f"{place}: {first['msg']}", place)
    return InvalidRequest(
        f"{place}: {first['msg']}" if place else f"the body is not valid JSON: {first['msg']}", place or None
    )


def _is_key(part: str) -> bool:
    """Not the name of a type, which pydantic adds where several are possible."""
    return "[" not in part and "(" not in part
