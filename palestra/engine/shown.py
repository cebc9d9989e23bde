"""Formats text from servers for messages: it may be of any length, with any characters."""

from __future__ import annotations

from palestra.terminal import one_line

_MOST = 200  # characters


def one_line_of(said: object) -> str:
    """Return a server's text as one line without control characters, truncated if long."""
    text = one_line(str(said) if not isinstance(said, str) else said[: 4 * _MOST])
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def problem(error: Exception) -> str:
    """Return an error's kind and message in the format of `one_line_of`."""
    return f"{type(error).__name__}: {one_line_of(error)}"
