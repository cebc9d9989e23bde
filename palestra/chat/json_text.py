"""JSON objects with their members as they were written, because parsing and printing again may change the text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class Member:
    """A value of a JSON object, and the text from which it was parsed."""

    value: Any
    text: str


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_SPACE = " \t\r\n"


def read_object(text: str, at: int = 0) -> tuple[dict[str, Member], int]:
    """Parse the JSON object that begins at a place of a text, after white space.

    Args:
        text: the text.
        at: index at which to begin.

    Returns:
        The object's members, of equal keys the last, and the index after the object.

    Raises:
        ValueError: there is no complete JSON object, or it is nested too deep.
    """
    at = _expect(text, at, "{")
    members: dict[str, Member] = {}
    if _next(text, at) == "}":
        return members, _expect(text, at, "}")
    while True:
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise ValueError(f"a key is missing at character {at}")
        start = _skip(text, _expect(text, at, ":"))
        value, at = _value(text, start)
        members[key] = Member(value, text[start:at])
        if _next(text, at) == "}":
            return members, _expect(text, at, "}")
        at = _expect(text, at, ",")


def object_text(text: str) -> str | None:
    """Return `text` without white space around it if it is a JSON object, else None."""
    try:
        end = read_object(text)[1]
    except ValueError:
        return None
    return None if text[end:].strip(_SPACE) else text.strip(_SPACE)


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, _skip(text, at))
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _next(text: str, at: int) -> str:
    at = _skip(text, at)
    return text[at : at + 1]


def _expect(text: str, at: int, wanted: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != wanted:
        raise ValueError(f"{wanted!r} is missing at character {at}")
    return at + 1
