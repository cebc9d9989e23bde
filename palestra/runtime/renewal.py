"""What a job does when its base server has forgotten it: begin again from its newest checkpoint, in the same process.

The data plane, the store and the episodes that are being played stay; calls wait until the weights are there again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from palestra.errors import PalestraError
from palestra.learner import Learner
from palestra.runtime.shared_base import BaseConnection
from palestra.waiting import race


@dataclass(frozen=True, slots=True)
class Renewal:
    """How a job begins again.

    Attributes:
        base: the connection to the base server.
        again: gives the server the policies that are trained, and returns a learner that begins at the newest
            checkpoint; None: the job trains nothing.
    """

    base: BaseConnection
    again: Callable[[], Awaitable[Learner | None]]

    async def unless_lost(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run work until it ends, and return True; or until the base server has forgotten the job, and return False.

        Args:
            work: is cancelled at a loss, at any moment, as if the process had been killed.

        Raises:
            PalestraError: the work has failed, and the server was not lost.
        """
        try:
            return (await race(work, self.base.lost())).index == 0
        except PalestraError:
            if not self.base.is_lost:
                raise
            return False

    async def renew(self) -> Learner | None:
        """Begin anew at the server, again if that is lost meanwhile.

        Raises:
            PalestraError: the server does not take the job any more.
        """
        while True:
            try:
                await self.base.renew()
                return await self.again()
            except PalestraError:
                if not self.base.is_lost:
                    raise
