"""Output to a terminal: foreign text cannot move the cursor, set the title or reorder lines.

Reasons, names, metadata, logs and errors may come from anyone who can reach a server. Every control character in them
is replaced by its control picture (`␛` for escape), so that a terminal shows it instead of executing it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 except newline and tab, DEL and C1; separators of lines and paragraphs; marks of direction; characters without
# width, in which text can hide; surrogates. Joiners (U+200C, U+200D) stay: scripts and emoji need them. The page has
# the same list (dom.js).
_CONTROL = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
# Unicode has a picture of each C0 character, in the same order from U+2400 on.
_PLAIN = str.maketrans("→…–—“”‘’×·│─", ">~--\"\"''x.|-")  # where they can't be written
NO_WIDTH = 4096  # columns of what is no terminal: more than a line has
_PICTURES, _DELETE, _UNKNOWN = 0x2400, "\u2421", "\ufffd"


def printable(text: str) -> str:
    """Return the text with control characters made visible, except newlines and tabs."""
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return the text as from `printable`, on one line, for a table cell or a field."""
    return printable(" ".join(text.split()))


def encodable(text: str, encoding: str | None) -> str:
    """Return the text with `?` for what an encoding lacks, because not every terminal is UTF-8; None: any text."""
    if encoding is None or encoding.lower().replace("-", "").startswith("utf"):
        return text
    return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)


def say(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Write a line with control characters made visible, and flush it; used by all commands."""
    stream = file or sys.stdout
    stream.write(encodable(printable(text), getattr(stream, "encoding", None)) + end)
    stream.flush()


class TerminalConsole(Console):
    """A rich console for foreign text, whose control characters and markup such as `[red]` have no effect.

    Styles are those of `rich.text.Text`. A file or a pipe has no width to which lines are fitted.
    """

    def __init__(self, **settings: Any) -> None:
        """Take settings of `Console`."""
        super().__init__(markup=False, emoji=False, highlight=False, **settings)
        if not self.is_terminal and "width" not in settings and "COLUMNS" not in os.environ:
            self.width = NO_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like `Console`, with control and unsupported characters replaced."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(encodable(printable(segment.text), self.encoding), segment.style)


class LogFormatter(logging.Formatter):
    """Formats log records for a terminal, with control characters made visible."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text from `logging.Formatter`, with control characters replaced."""
        return printable(super().format(record))


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback of an uncaught error to standard error, printable (a `sys.excepthook`)."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return _DELETE if code == 0x7F else _UNKNOWN


_MOST = 200  # characters


def one_line_of(said: object) -> str:
    """Return a server's text as one line without control characters, truncated if long."""
    text = one_line(str(said) if not isinstance(said, str) else said[: 4 * _MOST])
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def problem(error: Exception) -> str:
    """Return an error's kind and message in the format of `one_line_of`."""
    return f"{type(error).__name__}: {one_line_of(error)}"
