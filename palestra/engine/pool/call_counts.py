"""What a pool has to do and has done, counted where its callers are, so that replaced workers leave no gap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from palestra.engine.replay import TokenReplay


class CallCounts:
    """The requests of a pool that are open, and the tokens that it has given."""

    def __init__(self) -> None:
        """Begin without requests."""
        self._open: set[TokenReplay] = set()
        self._ended_tokens = 0

    @contextlib.contextmanager
    def counted(self, reply: TokenReplay) -> Iterator[None]:
        """Count a request while the block runs."""
        self._open.add(reply)
        try:
            yield
        finally:
            self._open.discard(reply)
            self._ended_tokens += len(reply.tokens)

    @property
    def waiting(self) -> int:
        """Return how many requests have no token yet."""
        return sum(not reply.tokens for reply in self._open)

    @property
    def running(self) -> int:
        """Return how many requests have a token."""
        return sum(bool(reply.tokens) for reply in self._open)

    @property
    def sampled_tokens(self) -> int:
        """Return how many tokens callers have got; those that were sampled again count once."""
        return self._ended_tokens + sum(len(reply.tokens) for reply in self._open)
