"""Environments for episodes: made, set up, used again where they allow it, and closed whatever happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.rollout.collect import Termination, failing
from palestra.schemas.clock import Clock

log = logging.getLogger("palestra.rollout")
CLOSE_SECONDS = 30.0
Made = Environment | ConcurrentEnvironment


class Environments:
    """One for each episode that is being played. `setup` comes once, `reset` with every episode, `close` at the end."""

    def __init__(self, make: Callable[[], Made], *, system: str | None, clock: Clock) -> None:
        """`system` is the system message of an `Environment`'s agent."""
        self._make, self._system, self._clock = make, system, clock
        self._idle: list[Made] = []
        self._kept = False

    def keep(self) -> None:
        """From now on, environments that may be used again are kept until `close`."""
        self._kept = True

    async def close(self) -> None:
        """Close those that are kept."""
        self._kept = False
        while self._idle:
            await self._close(self._idle.pop())

    @asynccontextmanager
    async def one(self) -> AsyncIterator[ConcurrentEnvironment]:
        """An environment for one episode.

        Raises:
            RolloutFailed: it could not be made, or set up.
        """
        made = self._idle.pop() if self._idle else None
        usable = False
        try:
            with failing(Termination.ENVIRONMENT_FAILED):
                if made is None:
                    made = self._make()
                    environment = self._concurrent(made)
                    await environment.setup()
                else:
                    environment = self._concurrent(made)
            yield environment
            usable = made.reusable
        finally:
            if usable and self._kept and made is not None:
                self._idle.append(made)
            elif made is not None:
                await asyncio.shield(self._close(made))

    async def _close(self, made: Made) -> None:
        """What is wrong with it now changes nothing of the episode that it had."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._concurrent(made).close()
        except Exception as error:  # noqa: BLE001 - the user's; the episode that it had is over
            log.warning("closing a %s failed: %s: %s", type(made).__name__, type(error).__name__, error)

    def _concurrent(self, made: Made) -> ConcurrentEnvironment:
        return (
            SerialEnvironment(made, system=self._system, clock=self._clock) if isinstance(made, Environment) else made
        )
