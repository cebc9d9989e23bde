"""Chooses the worker of a pool for a request: a pure function of each worker's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.types.calls import PolicyVersion

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
        requests: its present number.
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
