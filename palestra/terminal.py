"""What is written to a terminal: text of others never moves its cursor, sets its title or reorders its lines.

Reasons, names, metadata, logs and errors may come from anybody who can reach a server. Every control character in them
is shown as a picture of itself (`␛` for escape), so that what is seen is what is there.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 but newline and tab, DEL and C1; line and paragraph separators; overrides of writing direction; halves of a pair.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PICTURES, _DELETE, _UNKNOWN = 0x2400, "\u2421", "\ufffd"  # pictures of C0 stand in their order


def printable(text: str) -> str:
    """Return the text with every control character shown and not obeyed; only newlines and tabs stay."""
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return the text as `printable` does, on one line: for a cell of a table, or a field of a line."""
    return printable(" ".join(text.split()))


def say(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Write a line, at once, to standard output or another stream. The commands write nothing in another way.

    Args:
        text: may have text of others in it, which is shown and not obeyed.
        end: what follows it.
        file: None: standard output.
    """
    stream = file or sys.stdout
    stream.write(printable(text) + end)
    stream.flush()


class TerminalConsole(Console):
    """A console of rich whose own styles work, while text of others is shown and not obeyed."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console`."""
        for segment in super().render(renderable, options):
            if segment.control or _CONTROL.search(segment.text) is None:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class LogFormatter(logging.Formatter):
    """Lines of a log for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """See `Formatter`."""
        return printable(super().format(record))


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an error that nobody caught (a `sys.excepthook`)."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return _DELETE if code == 0x7F else _UNKNOWN
