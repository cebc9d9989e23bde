"""Ids to text while they are sampled: a character goes out when all of its tokens are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_UNFINISHED = "\ufffd"  # how a decoder shows bytes that are no character, or not yet
_UNCLEAR = 16  # tokens that end in such bytes, after which we look whether they can still become characters
_CHARACTER = 4  # the most tokens that one character has


class TextStream:
    """The text of a reply, token by token; together it is what decoding all ids at once gives.

    A few tokens of before are decoded with each new one: some tokenizers write a token in another way at the start.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_ids: Collection[int] = ()) -> None:
        """`stop_ids` at the end of a reply are not part of its text."""
        self._decode, self._stops = decode, stop_ids
        self._ids: list[int] = []
        self._known = 0  # leading ids of these whose text has gone out
        self._known_text = ""
        self._stopped: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain with this token."""
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
        """The rest."""
        return self._let_go(self._decode(self._ids), len(self._ids))

    def _let_go(self, text: str, until: int) -> str:
        out = text[len(self._known_text) :]
        self._ids = self._ids[self._known :]
        self._known = until - self._known
        self._known_text = self._decode(self._ids[: self._known])
        return out

    def _let_go_of_no_characters(self, text: str) -> str:
        """Bytes that no later ones can make a character of must not pile up: the text before them is certain."""
        for until in range(len(self._ids) - _CHARACTER, self._known, -1):
            before = self._decode(self._ids[:until])
            if before + self._decode(self._ids[until:]) == text:
                out = before[len(self._known_text) :]
                self._ids, self._known, self._known_text = self._ids[until:], 0, ""
                return out
        return ""
