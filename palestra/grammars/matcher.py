"""The position of one reply in its grammar, as those see it who sample."""

from __future__ import annotations


class Matcher:
    """A reply's position in its grammar. `Grammars.advance` renews the masks of many matchers together.

    Attributes:
        mask: int32 [ceil(V / 32)], little-endian, as bytes: a bit for each token that may follow.
        pending: tokens accepted since the mask was made.
        closed: whether the matcher was released.
    """

    def __init__(self, mask: bytes) -> None:
        """Stand at the beginning of a reply.

        Args:
            mask: the tokens with which a reply may begin.
        """
        self.mask = mask
        self.pending: list[int] = []
        self.closed = False

    def accept(self, token: int) -> None:
        """Append a token that the mask allows; `Grammars.advance` then checks it and makes the next mask."""
        self.pending.append(token)
