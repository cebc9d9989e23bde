"""Time is passed in, so that leases can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """Unix seconds; may jump. Only for people to read."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back. All durations and leases use these."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()
