"""Clocks are passed in, so that tests of leases and time limits need not wait."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The source of time for a server, an engine or a store; tests use one that they can set."""

    def now(self) -> float:
        """Return Unix seconds, for people and for storage.

        They may jump, so durations are not measured with them.
        """
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back, for all durations and leases."""
        ...


class SystemClock:
    """The clocks of the machine, used by all programs except tests."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
