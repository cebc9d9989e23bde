"""Text of a reply while its ids are sampled.

A character is emitted when all of its tokens have arrived; text that may become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_UNFINISHED = "\ufffd"  # how a decoder shows bytes that are no character, or not yet
_UNCLEAR = 16  # tokens that end in such bytes, after which we look whether they can still become characters
_CHARACTER = 4  # the most tokens that one character has


class TextStream:
    """The text of a reply, token by token; the joined pieces equal decoding all ids in one call."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_ids: Collection[int] = ()) -> None:
        """Begin a reply. `stop_ids` are not part of the text at the end of a reply."""
        self._decode, self._stops = decode, stop_ids
        self._ids: list[int] = []
        self._known = 0  # leading ids of these whose text has gone out
        self._known_text = ""
        self._stopped: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that one more token makes certain; empty while a character is incomplete."""
        if token in self._stops:
            self._stopped.append(token)
            return ""
        self._ids += [*self._stopped, token]
        self._stopped.clear()
        text = self._decode(self._ids)
        if not text.endswith(_UNFINISHED):
            return self._let_go(text, len(self._ids))
        new = len(self._ids) - self._known
        return self._let_go_of_no_characters(text) if new % _UNCLEAR == 0 else ""

    def end(self) -> str:
        """Return the rest of the text at the end of the reply."""
        return self._let_go(self._decode(self._ids), len(self._ids))

    def _let_go(self, text: str, until: int) -> str:
        # A few tokens stay: some tokenizers write the first token of a text in another way than those that follow.
        out = text[len(self._known_text) :]
        self._ids = self._ids[self._known :]
        self._known = until - self._known
        self._known_text = self._decode(self._ids[: self._known])
        return out

    def _let_go_of_no_characters(self, text: str) -> str:
        """Return the text before bytes that can no longer become a character, so that such bytes do not pile up."""
        for until in range(len(self._ids) - _CHARACTER, self._known, -1):
            before = self._decode(self._ids[:until])
            if before + self._decode(self._ids[until:]) == text:
                out = before[len(self._known_text) :]
                self._ids, self._known, self._known_text = self._ids[until:], 0, ""
                return out
        return ""


class StopStrings:
    """Searches for several strings together, in linear time, however the text is split.

    The string that is complete first ends the text; of several complete at the same character, the longest. The
    algorithm is that of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(filter(None, strings), key=len, reverse=True)
        self._borders = [_borders(string) for string in self._strings]
        self._matched = [0] * len(self._strings)  # for each string: how many of its characters end the text
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that certainly precedes any stop string; empty after one was found."""
        if not self._strings:
            return text
        if self.found is not None:
            return ""
        for place, character in enumerate(text):
            for number in range(len(self._strings)):
                self._step(number, character)
            complete = (s for s, n in zip(self._strings, self._matched, strict=True) if n == len(s))
            self.found = next(complete, None)
            if self.found is not None:
                whole = self._held + text[: place + 1]
                self._held = ""
                return whole[: len(whole) - len(self.found)]
        whole = self._held + text
        certain = len(whole) - max(self._matched)
        self._held = whole[certain:]
        return whole[:certain]

    def end(self) -> str:
        """Return the held-back text at the end."""
        held, self._held = self._held, ""
        return held

    def _step(self, number: int, character: str) -> None:
        string, borders, matched = self._strings[number], self._borders[number], self._matched[number]
        while matched and string[matched] != character:
            matched = borders[matched]
        self._matched[number] = matched + (string[matched] == character)


def _borders(string: str) -> list[int]:
    """Return for each prefix of the string its longest proper prefix that is also a suffix."""
    borders = [0, 0]
    for character in string[1:]:
        border = borders[-1]
        while border and string[border] != character:
            border = borders[border]
        borders.append(border + (string[border] == character))
    return borders
