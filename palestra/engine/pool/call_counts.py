"""Counters of a pool, kept on the caller's side so that replacing workers does not reset them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from palestra.engine.replay import TokenReplay


class CallCounts:
    """Open requests of a pool, and the tokens it has delivered."""

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
        """Return the number of requests without a token."""
        return sum(not reply.tokens for reply in self._open)

    @property
    def running(self) -> int:
        """Return the number of requests with at least one token."""
        return sum(bool(reply.tokens) for reply in self._open)

    @property
    def sampled_tokens(self) -> int:
        """Return the number of delivered tokens; resampled ones count once."""
        return self._ended_tokens + sum(len(reply.tokens) for reply in self._open)
