"""Chooses the worker of a pool for a request: a pure function of each worker's state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from palestra.types.calls import PolicyVersion, TokenSequence

REQUEST_TOKENS = 64
"""How many prompt tokens cost a worker as much as one more request beside those that it has.

A request delays its neighbours by its share of every pass, a prompt by its one computation. Without this rate the
longest known beginning would always win, and a system prompt that all requests share would send all of them to the
worker that was the first to see it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A worker that may get a request.

    Attributes:
        known: prompt tokens whose prefix is in its cache.
        updating: whether it is taking new weights, so that requests may wait.
    """

    known: int
    requests: int
    version: PolicyVersion
    updating: bool = False


def place_request(prompt_tokens: int, candidates: Sequence[Candidate]) -> int:
    """Return the index of the worker that should get a request.

    Updating workers come last. Otherwise the least loaded worker gets it: uncached prompt tokens plus `REQUEST_TOKENS`
    per open request. Ties go to the longest cached prefix, then the newer weights, then the order.
    """

    def order(number: int) -> tuple[bool, int, int, tuple[int, int], int]:
        one = candidates[number]
        work = prompt_tokens - one.known + REQUEST_TOKENS * one.requests
        return one.updating, work, -one.known, (-one.version.incarnation, -one.version.n), number

    return min(range(len(candidates)), key=order)


BLOCK_TOKENS = 16


def block_hashes(tokens: TokenSequence, known: Sequence[int] = ()) -> list[int]:
    """Return a hash for each whole block of a token sequence, covering all tokens up to the block's end.

    Two sequences share k hashes if their first k blocks have equal ids and image digests. Python salts hashes, so they
    are only valid in this process. `known` are hashes of the beginning, which are not recomputed.
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
        """Begin empty. The capacity, per policy, is about the size of the worker's prefix cache."""
        self._capacity = max(capacity_tokens // BLOCK_TOKENS, 1)
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def known(self, policy: str, hashes: Sequence[int]) -> int:
        """Return the number of leading tokens that are probably cached."""
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
