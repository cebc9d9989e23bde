"""Converts a program's terminal output to plain text: its beginning and end, without escape sequences."""

from __future__ import annotations

import re

from palestra.terminal import printable

# CSI, OSC and the other strings (ended by BEL or ST), escape with one more character.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?", re.DOTALL)


def plain_text(written: str) -> str:
    """Return a terminal's output without colours, titles and cursor movements.

    A carriage return restarts its line, as for progress bars, and a backspace removes a character. Other control
    characters are replaced by their control pictures.
    """
    text = _ESCAPES.sub("", written).replace("\r\n", "\n")
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return printable(_without_backspaces(text) if "\b" in text else text)


def _without_backspaces(text: str) -> str:
    """Apply each backspace to the character before it, unless that ends a line."""
    kept: list[str] = []
    for character in text:
        if character == "\b" and kept and kept[-1] not in "\n\b":
            kept.pop()
        else:
            kept.append(character)
    return "".join(kept)


class Output:
    """The beginning and the end of a program's output, however long it is."""

    def __init__(self, most: int) -> None:
        """Begin empty.

        Args:
            most: number of bytes to keep of the beginning, and of the end.
        """
        self._most = most
        self._head, self._tail, self._count = bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        """Add further output."""
        self._count += len(chunk)
        room = self._most - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 4 * self._most:
            del self._tail[: -self._most]

    def take(self) -> str:
        """Return the output as plain text, with the number of missing bytes, and begin again."""
        head, tail, count = bytes(self._head), bytes(self._tail[-self._most :]), self._count
        self._head, self._tail, self._count = bytearray(), bytearray(), 0
        missing = count - len(head) - len(tail)
        if not missing:
            return plain_text((head + tail).decode(errors="replace"))
        first, last = (plain_text(part.decode(errors="replace")) for part in (head, tail))
        return f"{first}\n… ({missing:,} bytes are left out) …\n{last}"
