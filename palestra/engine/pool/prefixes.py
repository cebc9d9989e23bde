"""Prefixes that a worker has computed lately, so that prompts are routed to their cached prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from palestra.types.calls import TokenSequence

BLOCK_TOKENS = 16


def block_hashes(tokens: TokenSequence, known: Sequence[int] = ()) -> list[int]:
    """Return a hash for each whole block of a token sequence, covering all tokens up to the block's end.

    Two sequences share k hashes if their first k blocks have equal ids and image digests. Python salts hashes, so they
    are only valid in this process.

    Args:
        known: hashes of the beginning, which are not recomputed.
    """
    data, width = tokens.ids.tobytes(), tokens.ids.itemsize * BLOCK_TOKENS
    found, before = list(known), known[-1] if known else 0
    for number in range(len(known), len(data) // width):
        block = data[number * width : (number + 1) * width]
        media = _media_of(tokens, number) if tokens.media else ()
        before = hash((before, block, media))
        found.append(before)
    return found


def _media_of(tokens: TokenSequence, number: int) -> tuple[tuple[int, str], ...]:
    """Return the images behind placeholders of a block, each with its position in the sequence."""
    start, end = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
    return tuple(
        (span.start, span.digest) for span in tokens.media if span.start < end and span.start + span.tokens > start
    )


class PrefixIndex:
    """Prefixes that one worker probably has cached, by policy, with LRU eviction."""

    def __init__(self, capacity_tokens: int) -> None:
        """Begin empty.

        Args:
            capacity_tokens: per policy; about the size of the worker's prefix cache.
        """
        self._capacity = max(capacity_tokens // BLOCK_TOKENS, 1)
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def known(self, policy: str, hashes: Sequence[int]) -> int:
        """Return the number of leading tokens that are probably cached.

        Args:
            hashes: from `block_hashes`.
        """
        blocks = self._blocks.get(policy)
        if not blocks:
            return 0
        count = next((number for number, one in enumerate(hashes) if one not in blocks), len(hashes))
        return count * BLOCK_TOKENS

    def add(self, policy: str, hashes: Sequence[int]) -> None:
        """Record that a sequence was sent to the worker."""
        blocks = self._blocks.setdefault(policy, OrderedDict())
        for one in reversed(hashes):  # so that ends are forgotten before the beginnings that they need
            blocks[one] = None
            blocks.move_to_end(one)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def clear(self, policy: str) -> None:
        """Drop a policy's prefixes, for example after a weight update."""
        self._blocks.pop(policy, None)
