"""Time limits of agents' turns: how long a role may think, and the clock that counts it down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimit:
    """How long a role may think about one action.

    Attributes:
        seconds: by the event loop's clock, from the moment at which the role is shown the observation. Of a seat, which
            a worker outside of the server plays, only the time counts in which a worker has it.
        default: text of the action that is taken in its place; None: it is late, which fails the episode unless the
            environment's `forfeits` have `Fault.LATE`.
    """

    seconds: float
    default: str | None = None

    def __post_init__(self) -> None:
        """Check the number.

        Raises:
            ValueError: `seconds` is no positive number.
        """
        if not self.seconds > 0:
            raise ValueError(f"a time limit is a positive number of seconds, not {self.seconds}")


class TurnClock:
    """Counts down the time for one action while it runs, and calls back when the time is over."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        """Set a clock that does not run yet.

        Args:
            seconds: that are left.
            late: is called once, by the event loop, when none are left.
        """
        self._left, self._late = seconds, late
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0

    def run(self) -> None:
        """Let the clock run from now on; one that runs goes on."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._timer = loop.call_later(self._left, self._late)

    def hold(self) -> None:
        """Hold the clock; what is left stays."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left = max(self._left - (asyncio.get_running_loop().time() - self._since), 0.0)
