"""A pool of environments for episodes: made, set up, reused where they allow it, and always closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.envs.concurrent import close_or_log
from palestra.rollout.result import Termination, classify_errors
from palestra.types.clock import Clock

log = logging.getLogger("palestra.rollout")
CLOSE_SECONDS = 30.0
Made = Environment | ConcurrentEnvironment


class EnvironmentPool:
    """Provides each running episode with its own environment.

    `setup` is called once per environment, `reset` with every episode, `close` at the end.
    """

    def __init__(self, make: Callable[[], Made], *, system: str | None, clock: Clock) -> None:
        """Create an empty pool. `system` is the system message of the agent of an `Environment`; None: the
        environment's own.
        """
        self._make, self._system, self._clock = make, system, clock
        self._idle: list[Made] = []
        self._kept = False

    def keep(self) -> None:
        """From now on, keep reusable environments until `close`."""
        self._kept = True

    async def close(self) -> None:
        """Close the kept environments."""
        self._kept = False
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(self._close, idle))

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[ConcurrentEnvironment]:
        """Provide an environment for one episode while the block is open."""
        made = self._idle.pop() if self._idle else None
        usable = False
        try:
            with classify_errors(Termination.ENVIRONMENT_FAILED):
                if made is None:
                    made = self._make()
                    environment = self._concurrent(made)
                    await environment.setup()
                else:
                    environment = self._concurrent(made)
            yield environment
            usable = made.reusable and not environment.broken
        finally:
            if usable and self._kept and made is not None:
                self._idle.append(made)
            elif made is not None:
                await self._close(made)

    async def _close(self, made: Made) -> None:
        if not (environment := self._concurrent(made)).holds_nothing:
            await close_or_log(environment, CLOSE_SECONDS, log, type(made).__name__)

    def _concurrent(self, made: Made) -> ConcurrentEnvironment:
        return (
            SerialEnvironment(made, system=self._system, clock=self._clock) if isinstance(made, Environment) else made
        )
