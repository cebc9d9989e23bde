"""Stop strings, found in text as it comes; text that may become one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for several strings at once, in time linear in the text, however it is cut into pieces.

    The string that is complete first ends the text; of several that are complete with the same character, the longest.
    The search is that of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(filter(None, strings), key=len, reverse=True)
        self._borders = [_borders(string) for string in self._strings]
        self._matched = [0] * len(self._strings)  # how many characters of each the text ends with
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain to come before any stop string. When one is found, nothing more is let go."""
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
        """What was held back; the text is over without a stop string, or with one that was found."""
        held, self._held = self._held, ""
        return held

    def _step(self, number: int, character: str) -> None:
        string, borders, matched = self._strings[number], self._borders[number], self._matched[number]
        while matched and string[matched] != character:
            matched = borders[matched]
        self._matched[number] = matched + (string[matched] == character)


def _borders(string: str) -> list[int]:
    """For each length of a beginning, the longest shorter beginning that it ends with."""
    borders = [0, 0]
    for character in string[1:]:
        border = borders[-1]
        while border and string[border] != character:
            border = borders[border]
        borders.append(border + (string[border] == character))
    return borders
