"""State shared by a pool and the keeper of its workers, and the weights that every worker must have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from palestra.errors import EngineFailure, PalestraError
from palestra.models.weights import WeightSource
from palestra.types.calls import PolicyVersion


class KeptWeights(Protocol):
    """Weights that any worker can read while this object is referenced."""

    @property
    def source(self) -> WeightSource:
        """Return the source that a worker reads."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WantedPolicy:
    """A policy as every worker should have it. Equality is identity.

    Attributes:
        like: initial policy whose kind of model it has; None: it is an initial policy itself.
        weights: None: those that `like` had at the start.
    """

    name: str
    like: str | None
    version: PolicyVersion
    weights: KeptWeights | None


def missing(wanted: Mapping[str, WantedPolicy], present: Mapping[str, WantedPolicy]) -> list[WantedPolicy]:
    """Return the policies that a worker still has to take, in a valid order.

    Copies of a policy's first weights come before that policy's own new weights, which would replace them.
    """
    due = [policy for name, policy in wanted.items() if present.get(name) is not policy]
    return sorted(due, key=lambda policy: policy.weights is not None)


def leftover(wanted: Mapping[str, WantedPolicy], present: Mapping[str, WantedPolicy]) -> list[str]:
    """Return the added policies that a worker must remove; see `missing`."""
    return [name for name, policy in present.items() if policy.like is not None and name not in wanted]


log = logging.getLogger("palestra.engine")
MOST_NEWS = 100  # lines about workers that are kept until they are read


class PoolState:
    """The target state of a pool's workers, and the outcome of the pool.

    Attributes:
        wanted: policies that every worker must have in addition to those of its start, by name.
        changed: notified when workers begin or cease to serve.
        failure: resolved with the reason when the pool fails.
        news: messages for the job's operators.
    """

    def __init__(self) -> None:
        """Create an open pool without workers, on the running event loop."""
        self.wanted: dict[str, WantedPolicy] = {}
        self.paused = self.closed = False
        self.changed = asyncio.Condition()
        self.failure: asyncio.Future[PalestraError] = asyncio.get_running_loop().create_future()
        self.news: asyncio.Queue[str] = asyncio.Queue(MOST_NEWS)

    def tell(self, text: str) -> None:
        """Add a message for the job's operators; see `next_loss`. The oldest of many is dropped."""
        log.info("%s", text)
        if self.news.full():
            self.news.get_nowait()
        self.news.put_nowait(text)

    def fail(self, error: PalestraError) -> None:
        """Fail the whole pool; the first reason counts."""
        if not self.failure.done():
            self.failure.set_result(error)

    async def notify(self) -> None:
        """Wake callers that wait for a worker or a change of the pool."""
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition of the pool's workers holds, or the pool is closed."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.closed or condition())

    def check_open(self) -> None:
        """Raise the error of a closed or failed pool."""
        if self.closed:
            raise EngineFailure("the engine was stopped")
        if self.failure.done():
            raise self.failure.result()
