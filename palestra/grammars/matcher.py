"""The position of one reply in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from palestra.errors import GrammarRefused, InvalidRequest
from palestra.grammars.walking import walk_grammar

_LIMITS = ("fuel", "too many", "too large", "too complex", "unable to determine", "max is")  # in llguidance's errors


class Matcher:
    """A reply's position in its grammar. `Grammars.advance` updates the masks of many matchers together.

    Attributes:
        mask: int32 [ceil(V / 32)], little-endian, as bytes: one bit for each token that may follow.
    """

    def __init__(self, matcher: LLMatcher, mask: bytes) -> None:
        """Stand at the beginning of a reply. `mask` has the tokens with which a reply may begin."""
        self._matcher, self.mask = matcher, mask
        self.pending: list[int] = []
        self.closed = False

    def accept(self, token: int) -> None:
        """Append a token that the mask allows; `Grammars.advance` then checks it and computes the next mask."""
        self.pending.append(token)

    def advance(self) -> None:
        """Accept the pending tokens and renew the mask. Raises InvalidRequest: a token does not match the grammar, or
        is over a limit.
        """
        try:
            (self.mask,) = walk_grammar(self._matcher, self.pending, [len(self.pending)])
        except ValueError as error:
            raise refusal(str(error)) from None
        self.pending = []

    def walk(self, tokens: Sequence[int], wanted: Sequence[int], keep: bool = True) -> NDArray[np.int32]:
        """Return the masks at some places of a reply, int32 [W, B], from its beginning; see `Grammars.walk`."""
        masks = bytearray()  # writable, as torch wants it
        try:
            for mask in walk_grammar(self._matcher, tokens, frozenset(wanted)):
                masks += mask if keep else b""
        except ValueError as error:
            raise refusal(str(error)) from None
        return np.frombuffer(masks, "<i4").reshape(-1, len(self.mask) // 4)


def refusal(problem: str) -> InvalidRequest:
    """Return GrammarRefused if `llguidance` reports a limit, otherwise InvalidRequest."""
    text = " ".join(problem.replace("<non-verbose/>", "").split())
    text = text.rsplit("rror: ", 1)[-1].split("; consider")[0]  # without advice to the author of the grammar
    if "unable to determine" in text.lower():  # what follows is the whole regular expression
        return GrammarRefused("its patterns can't be intersected within the limit of llguidance")
    if any(word in text.lower() for word in _LIMITS):
        return GrammarRefused(text[:300])
    return InvalidRequest(text[:300])
