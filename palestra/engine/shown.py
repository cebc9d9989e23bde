"""What a server has sent, in messages: of any length there, and with any characters."""

from __future__ import annotations

from palestra.terminal import one_line

_MOST = 200  # characters


def one_line_of(said: object) -> str:
    """Return what a server has said, as one line without control characters, and cut where it is long."""
    text = one_line(str(said) if not isinstance(said, str) else said[: 4 * _MOST])
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def problem(error: Exception) -> str:
    """Return an error's kind and message as `one_line_of` does."""
    return f"{type(error).__name__}: {one_line_of(error)}"
