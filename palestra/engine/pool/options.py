"""How a pool of inference workers behaves, what it asks of those who start its workers, and what it counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from palestra.engine.base import PREFIX_TOKENS, TokenReplay
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import Conflict, PalestraError


@dataclass(eq=False, slots=True)
class NumberChange:
    """A change of the number of workers, independent of the callers that wait for it.

    Attributes:
        ended: None when the target is reached, or the reason why it will not be.
        work: the task that carries it out.
    """

    replicas: int
    ended: asyncio.Future[PalestraError | None]
    work: asyncio.Task[None] | None = field(default=None)

    def end(self, why: PalestraError | None) -> None:
        """End the change: the target is reached (None), or the reason; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(why)

    def overtake(self, replicas: int) -> None:
        """End the change because another target was requested."""
        self.end(
            Conflict(
                f"the change to {self.replicas} inference workers was overtaken by another one, to {replicas}; "
                "GET /status has those that there are"
            )
        )
        if self.work is not None:
            self.work.cancel()


class CallCounts:
    """Open requests of a pool, and the tokens it has delivered."""

    def __init__(self) -> None:
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


START_SECONDS = 900.0  # to load the models, unless the options say otherwise

StartWorker = Callable[[int], Awaitable[StartedWorker]]
"""Starts the worker of a place, and returns when it has the weights of the start. A PalestraError that is no
EngineFailure says that no start can succeed."""
CheckCapacity = Callable[[int], Awaitable[None]]
"""Raises a PalestraError if the machine has no room for so many workers beside those that serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """Options of a pool.

    Attributes:
        most: limit, if each needs its own position in the cluster; None: any number.
        sync: whether workers take new weights one after another or all together.
        stuck_seconds: a worker with work but no progress for so long is replaced.
        prefix_tokens: remembered prefixes per policy and worker, in tokens.
        start_seconds: timeout for starting a worker.
        kinds: by worker number, if a request that one kind refuses may go to another; the number of workers is then
            fixed. (): all workers are alike.
    """

    replicas: int
    most: int | None = None
    sync: Literal["rolling", "all"] = "rolling"
    stuck_seconds: float = 60.0
    prefix_tokens: int = PREFIX_TOKENS
    start_seconds: float = START_SECONDS
    kinds: tuple[str, ...] = ()
