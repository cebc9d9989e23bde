"""Restarts a job's training after a loss, from its newest checkpoint, in the same process.

A loss is a base server that has forgotten the job, or a dead process of a sharded trainer. Data plane, store and
running episodes continue; calls wait until the weights are restored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from palestra.errors import PalestraError
from palestra.learner import Learner
from palestra.waiting import race


class Renewable(Protocol):
    """A part of a job that may be lost with its policies, and be renewed without them."""

    event_of_loss: str

    @property
    def loss(self) -> str:
        """Describe the newest loss."""
        ...

    @property
    def is_lost(self) -> bool:
        """Return whether all calls fail until `renew`."""
        ...

    async def lost(self) -> None:
        """Wait for a loss."""
        ...

    async def renew(self) -> None:
        """Begin again, without policies. Raises PalestraError if it was lost again, and `is_lost` says so; or it cannot
        be renewed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Renewal:
    """How a job begins again.

    Attributes:
        base: the part that may be lost.
        again: restores its trained policies, and returns a learner that begins at the newest checkpoint; None: the job
            does not train.
    """

    base: Renewable
    again: Callable[[], Awaitable[Learner | None]]

    async def unless_lost(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run work until it ends, and return True; or until its base is lost, and return False. `work`: cancelled at a
        loss, at any point, as if the process had been killed.
        """
        try:
            return (await race(work, self.base.lost())).index == 0
        except PalestraError:
            if not self.base.is_lost:
                raise
            return False

    async def renew(self) -> Learner | None:
        """Begin again, repeatedly if there are further losses meanwhile."""
        while True:
            try:
                await self.base.renew()
                return await self.again()
            except PalestraError:
                if not self.base.is_lost:
                    raise
