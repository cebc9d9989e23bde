"""A reply that is sampled a second time because the first attempt was lost, for a caller who has its beginning."""

from __future__ import annotations

from palestra.errors import ReplyLost
from palestra.types.calls import SampledTokens


class TokenReplay:
    """Delivers each token of a reply once, even if the reply is sampled several times.

    A request has a seed, so a retry repeats the same tokens unless other weights or another batch changed the
    arithmetic. Delivered tokens can't be taken back, so tokens of a retry are compared with them, and skipped while
    they are equal.
    """

    def __init__(self) -> None:
        self._given: list[int] = []  # tokens that the caller has
        self._seen = 0  # tokens of the present attempt

    @property
    def tokens(self) -> list[int]:
        """Return the tokens that the caller has."""
        return self._given

    def begin_again(self) -> None:
        """Begin another attempt."""
        self._seen = 0

    def take(self, piece: SampledTokens) -> SampledTokens | None:
        """Return the part of a piece that the caller does not have yet; None: it has all of it.

        Args:
            piece: next tokens of the present attempt.

        Raises:
            ReplyLost: the piece differs from what the caller has.
        """
        if self._seen == len(self._given):  # the usual case: nothing is repeated
            self._given += piece.ids
            self._seen += len(piece.ids)
            return piece
        known = min(len(piece.ids), len(self._given) - self._seen)
        if list(piece.ids[:known]) != self._given[self._seen : self._seen + known]:
            raise ReplyLost("a reply was lost before its end, and sampling it again has given other tokens")
        self._seen += known
        if known == len(piece.ids):
            return None
        rest = piece.ids[known:]
        self._given += rest
        self._seen += len(rest)
        return SampledTokens(ids=rest, logprobs=piece.logprobs[known:], version=piece.version, top=piece.top[known:])

    def end(self) -> None:
        """Check that the ended attempt is as long as what the caller has.

        Raises:
            ReplyLost: it is shorter.
        """
        if self._seen < len(self._given):
            raise ReplyLost("a reply was lost before its end, and sampling it again has given fewer tokens")
