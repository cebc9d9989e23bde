"""Search for stop strings in text that arrives in pieces; text that may become a stop string is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Searches for several strings together, in time linear in the text, however the text is cut into pieces.

    The string that is complete first ends the text; of several that are complete with the same character, the longest.
    The search is that of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(filter(None, strings), key=len, reverse=True)
        self._borders = [_borders(string) for string in self._strings]
        self._matched = [0] * len(self._strings)  # for each string: how many of its characters end the text
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that certainly precedes any stop string.

        After a stop string was found, no more text is given out.
        """
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
        """Return the text that was held back, when the text is over."""
        held, self._held = self._held, ""
        return held

    def _step(self, number: int, character: str) -> None:
        string, borders, matched = self._strings[number], self._borders[number], self._matched[number]
        while matched and string[matched] != character:
            matched = borders[matched]
        self._matched[number] = matched + (string[matched] == character)


def _borders(string: str) -> list[int]:
    """Return for each length of a beginning of the string the longest shorter beginning with which it ends."""
    borders = [0, 0]
    for character in string[1:]:
        border = borders[-1]
        while border and string[border] != character:
            border = borders[border]
        borders.append(border + (string[border] == character))
    return borders
