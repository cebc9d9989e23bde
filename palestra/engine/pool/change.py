"""A running change of a pool's number of workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

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
