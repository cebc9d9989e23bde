"""Request bodies: read after the key was checked, limited in size, and parsed in a thread if they are long."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.http.protocol import until_disconnect
from palestra.threads import WorkPool

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

UNSUPPORTED = "unsupported"  # type of the validation errors for values that this server does not implement
LONG_BODY = 32_768  # bytes; handing a longer body to a thread costs less than parsing it on the event loop
# Limits of one body. The largest useful one has 10,000 messages of parts, or the token ids of 128 prompts.
MAX_CONTAINERS, MAX_VALUES = 50_000, 1_000_000
MAX_KEYS = 100_000  # each is made into a string; 10,000 messages with calls and their results have 65,000
_MAY_BE_TOO_MANY = min(MAX_CONTAINERS, MAX_VALUES, MAX_KEYS)  # bytes
_PIECE = 65_536  # bytes of a body that are looked at without giving other threads a turn


def parse_body(kind: type[B], body: bytes) -> B:
    """Parse and validate a request body. Raises InvalidRequest: not JSON, a value of the wrong type, or too many
    values. Raises UnsupportedField: a validator of `kind` refused a value as `UNSUPPORTED`.
    """
    if len(body) > _MAY_BE_TOO_MANY:
        check_size(body)
    try:
        return kind.model_validate_json(body.removeprefix(BOM_UTF8))
    except ValidationError as error:
        raise _explain(error) from None


def check_size(body: bytes) -> None:
    """Raise InvalidRequest for JSON with so many values that parsing it would hold the GIL for long.

    Brackets and commas in strings count until the limits are exceeded; only then strings are skipped, because skipping
    is slower than counting.
    """
    if len(body) <= _MAY_BE_TOO_MANY:
        return
    for most, kinds, named in (
        (MAX_CONTAINERS, b"[{", "objects and lists"),
        (MAX_KEYS, b":", "keys"),
        (MAX_VALUES, b",", "values"),
    ):
        if _count(body, kinds) > most and sum(_count(piece, kinds) for piece in _outside_strings(body)) > most:
            raise InvalidRequest(f"the body has more than {most} {named}")


def _count(body: bytes, kinds: bytes) -> int:
    """Return how often the bytes of `kinds` occur in the body."""
    return sum(map(body.count, kinds))


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield what is outside of JSON strings, without quotes, in pieces."""
    inside, begun = 0, b""
    for start in range(0, len(body), _PIECE):
        piece = begun + body[start : start + _PIECE]
        whole = piece.rstrip(b"\\")
        begun = b"\\" * ((len(piece) - len(whole)) % 2)  # an escape whose second byte is in the next piece
        parts = whole.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2


async def read_request(kind: type[B], request: Request, pool: WorkPool) -> B:
    """Read the body of a request and validate it as a model. Raises InvalidRequest, UnsupportedField: see `parse_body`.
    Raises ClientDisconnect: the client closed the connection.
    """
    body = await request.body()
    if len(body) < LONG_BODY:
        return parse_body(kind, body)
    return await until_disconnect(request.scope, pool.run(parse_body, kind, body))


async def read_with(parse: Callable[[bytes], T], request: Request, pool: WorkPool) -> T:
    """Read the body of a request, and parse it. `parse`: called with the body, in a thread of `pool` if the body is
    long.
    """
    body = await request.body()
    if len(body) < LONG_BODY:
        return parse(body)
    return await until_disconnect(request.scope, pool.run(parse, body))


def _explain(error: ValidationError) -> InvalidRequest:
    """Return an error for the first thing that is wrong, with its path in the body."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(takewhile(_is_key, map(str, first["loc"])))[:200]
    if first["type"] == UNSUPPORTED:
        return UnsupportedField(f"{place}: {first['msg']}", place)
    return InvalidRequest(
        f"{place}: {first['msg']}" if place else f"the body is not valid JSON: {first['msg']}", place or None
    )


def _is_key(part: str) -> bool:
    """Return whether a part of a path is a key of the body instead of a type's name, which pydantic adds for unions."""
    return "[" not in part and "(" not in part
