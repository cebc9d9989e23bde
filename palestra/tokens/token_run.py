"""Runs of tokens, compared together with their media: different images have the same placeholder ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.types.calls import Ids, MediaSpan, TokenSequence

_SHORT = 8192  # entries whose bytes are copied and compared in a few microseconds

Digests = NDArray[np.object_]  # [N], the digest (str) of the media behind a placeholder; None for text


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """Consecutive tokens. Two tokens are equal if both their ids and their media digests are.

    Attributes:
        ids: int32 [N].
        digests: [N], the digest of the media behind each placeholder; None: all tokens are text.
    """

    ids: Ids
    digests: Digests | None = None

    @classmethod
    def of(cls, ids: Ids, media: Sequence[MediaSpan] = ()) -> TokenRun:
        """Return a run of tokens with the digests of its media. `ids` are int32 [N]; positions of `media` count from
        the first of them.
        """
        if not media:
            return cls(ids)
        digests = np.full(len(ids), None, np.object_)
        for span in media:
            digests[span.start : span.start + span.tokens] = span.digest
        return cls(ids, digests)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> TokenRun:
        """Return a part of the run, sharing its memory."""
        return TokenRun(self.ids[part], None if self.digests is None else self.digests[part])

    @property
    def first(self) -> tuple[int, str | None]:
        """Return the first token's id and digest, as a dict key."""
        return int(self.ids[0]), None if self.digests is None else self.digests[0]

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the run in hashable form: keys are equal exactly if all tokens are."""
        if self.digests is None or not any(self.digests):
            return (self.ids.tobytes(),)
        return (self.ids.tobytes(), *self.digests)

    def copy(self) -> TokenRun:
        """Return the run with its own memory, so that the run it is a part of can be freed."""
        return TokenRun(self.ids.copy(), None if self.digests is None else self.digests.copy())

    def followed_by(self, ids: Ids) -> TokenRun:
        """Return the run with text tokens `ids` [M] appended."""
        joined = np.concatenate((self.ids, ids))
        if self.digests is None:
            return TokenRun(joined)
        return TokenRun(joined, np.concatenate((self.digests, np.full(len(ids), None, np.object_))))

    def common(self, other: TokenRun) -> int:
        """Return the length of the common prefix of two runs."""
        length = common_prefix(self.ids, other.ids)
        if self.digests is None and other.digests is None:
            return length
        return common_prefix(self._digests(length), other._digests(length))

    def _digests(self, length: int) -> Digests:
        return np.full(length, None, np.object_) if self.digests is None else self.digests[:length]


def common_tokens(a: TokenSequence, b: TokenSequence) -> int:
    """Return the length of the common prefix of two sequences; placeholders of different images differ."""
    return TokenRun.of(*a).common(TokenRun.of(*b))


def common_prefix(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Return the length of the common prefix of two arrays, [N] and [M]."""
    shortest = min(len(a), len(b))
    if not shortest:
        return 0
    a, b = a[:shortest], b[:shortest]
    # numpy lets another thread run while it compares more than 500 entries, and a busy server waits longer for its turn
    # than for the comparison. Most calls continue an earlier one, so that all entries are equal.
    if shortest <= _SHORT and a.tobytes() == b.tobytes():
        return shortest
    different = a != b
    first = int(different.argmax())
    return first if different[first] else shortest
