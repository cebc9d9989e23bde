"""A change of a pool's number of workers that is under way."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from palestra.errors import Conflict, PalestraError


@dataclass(eq=False, slots=True)
class NumberChange:
    """A change of the number of workers, which may be waited for several times, and outlives those who wait.

    Attributes:
        replicas: workers that there are to be.
        ended: done when the number is reached, with None; or when it is not going to be, with the reason.
        work: carries the change out.
    """

    replicas: int
    ended: asyncio.Future[PalestraError | None]
    work: asyncio.Task[None] | None = field(default=None)

    def end(self, why: PalestraError | None) -> None:
        """Note that the number is reached (None), or why it is not; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(why)

    def overtake(self, replicas: int) -> None:
        """Give the change up, because another one asks for another number of workers."""
        self.end(
            Conflict(
                f"the change to {self.replicas} inference workers was overtaken by another one, to {replicas}; "
                "GET /status has those that there are"
            )
        )
        if self.work is not None:
            self.work.cancel()
