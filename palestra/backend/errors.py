"""Errors of a base server on their way to a job: an error that Palestra raises on purpose arrives as the same one."""

from __future__ import annotations

from typing import Any

from palestra import errors
from palestra.errors import PalestraError

_KNOWN = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PalestraError)
}


def error_fields(error: PalestraError) -> dict[str, Any]:
    """Return an error as JSON: its class, its message, and its attributes that JSON can hold."""
    plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
    return {"kind": type(error).__name__, "message": str(error), "fields": plain}


def error_of(given: dict[str, Any]) -> PalestraError:
    """Return the error that `error_fields` has described; one of a class that is not known is a PalestraError."""
    kind = _KNOWN.get(str(given.get("kind")), PalestraError)
    # The constructors of some classes make the message of other arguments, which a message does not have.
    error = kind.__new__(kind)
    error.args = (str(given.get("message")),)
    vars(error).update(given.get("fields") or {})
    return error
