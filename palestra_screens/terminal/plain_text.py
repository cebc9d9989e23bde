"""What a program wrote to a terminal, as plain text: the beginning and the end of it, without escape sequences."""

from __future__ import annotations

import re

from palestra.terminal import printable

# CSI, OSC and the other strings (ended by BEL or ST), escape with one more character.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?", re.DOTALL)


def plain_text(written: str) -> str:
    """Return what stays of a terminal's output when colours, titles and moves of the cursor are left out.

    A carriage return begins its line again, as progress bars do, and a backspace takes a character away. Every other
    control character is replaced by a picture of itself.
    """
    text = _ESCAPES.sub("", written).replace("\r\n", "\n")
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return printable(_without_backspaces(text) if "\b" in text else text)


def _without_backspaces(text: str) -> str:
    """Return text in which each backspace has taken the character before it away, unless that ends a line."""
    kept: list[str] = []
    for character in text:
        if character == "\b" and kept and kept[-1] not in "\n\b":
            kept.pop()
        else:
            kept.append(character)
    return "".join(kept)


class Output:
    """Bytes of a program of which only the beginning and the end are kept, however many there are."""

    def __init__(self, most: int) -> None:
        """Begin without any.

        Args:
            most: number of bytes that are kept of the beginning, and again of the end.
        """
        self._most = most
        self._head, self._tail, self._count = bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        """Add what the program wrote next."""
        self._count += len(chunk)
        room = self._most - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 4 * self._most:
            del self._tail[: -self._most]

    def take(self) -> str:
        """Return the output as plain text, which says how much is missing, and begin anew."""
        head, tail, count = bytes(self._head), bytes(self._tail[-self._most :]), self._count
        self._head, self._tail, self._count = bytearray(), bytearray(), 0
        missing = count - len(head) - len(tail)
        if not missing:
            return plain_text((head + tail).decode(errors="replace"))
        first, last = (plain_text(part.decode(errors="replace")) for part in (head, tail))
        return f"{first}\n… ({missing:,} bytes are left out) …\n{last}"
