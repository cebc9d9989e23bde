"""What a job does when what trains it is lost: begin again from its newest checkpoint, in the same process.

That is a base server that has forgotten the job, or a process of a sharded trainer.

The data plane, the store and the episodes that are being played stay; calls wait until the weights are there again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from palestra.errors import PalestraError
from palestra.learner import Learner
from palestra.waiting import race


class Renewable(Protocol):
    """What a job may lose, with its policies, and get again without them.

    Attributes:
        event_of_loss: kind of the event that is recorded.
    """

    event_of_loss: str

    @property
    def loss(self) -> str:
        """Return what has happened, in words; of the newest loss."""
        ...

    @property
    def is_lost(self) -> bool:
        """Return whether all calls fail until `renew`."""
        ...

    async def lost(self) -> None:
        """Return at a loss."""
        ...

    async def renew(self) -> None:
        """Begin again, without policies.

        Raises:
            PalestraError: it was lost again, and `is_lost` says so; or it can't be had any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class Renewal:
    """How a job begins again.

    Attributes:
        base: what may be lost.
        again: gives it the policies that are trained, and returns a learner that begins at the newest checkpoint; None:
            the job trains nothing.
    """

    base: Renewable
    again: Callable[[], Awaitable[Learner | None]]

    async def unless_lost(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run work until it ends, and return True; or until what it needs is lost, and return False.

        Args:
            work: is cancelled at a loss, at any moment, as if the process had been killed.

        Raises:
            PalestraError: the work has failed, and nothing was lost.
        """
        try:
            return (await race(work, self.base.lost())).index == 0
        except PalestraError:
            if not self.base.is_lost:
                raise
            return False

    async def renew(self) -> Learner | None:
        """Begin again, again if there is another loss meanwhile.

        Raises:
            PalestraError: the job can't begin again.
        """
        while True:
            try:
                await self.base.renew()
                return await self.again()
            except PalestraError:
                if not self.base.is_lost:
                    raise
