"""Time limits of agents' turns: how long a role may think, and the clock that counts it down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimit:
    """How long a role may think about one action.

    Attributes:
        seconds: from the moment when the role gets the observation. For an external player, only the time counts during
            which a worker has it.
        default: text of the action taken when the time is over; None: the role is late, which fails the episode unless
            the environment's `forfeits` include `Fault.LATE`.
    """

    seconds: float
    default: str | None = None

    def __post_init__(self) -> None:
        """Check the number."""
        if not self.seconds > 0:
            raise ValueError(f"a time limit is a positive number of seconds, not {self.seconds}")


class TurnClock:
    """A stoppable countdown for one action, with a callback."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        """Create a stopped clock.

        Args:
            seconds: remaining time.
            late: called once, by the event loop, when the time is over.
        """
        self._left, self._late = seconds, late
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0

    def run(self) -> None:
        """Run the clock; no effect if it runs."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._timer = loop.call_later(self._left, self._late)

    def hold(self) -> None:
        """Stop the clock and keep the remaining time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left = max(self._left - (asyncio.get_running_loop().time() - self._since), 0.0)
