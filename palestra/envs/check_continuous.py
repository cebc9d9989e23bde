"""The part of `check_environment` that is for worlds with a clock of their own: episodes in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import cast

from palestra.envs.check_concurrent import CheckedEpisode, Script
from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.continuous import ContinuousEnvironment
from palestra.types.messages import Observation

# Parts of a tick for which an agent thinks. No sum of some of them is a sum of others, or of whole ticks, so that the
# order of actions and ticks does not depend on how numbers are rounded.
_FIRST, _NEXT, _LONGER = math.sqrt(2) - 1, (math.sqrt(3) - 1) / 6, (math.sqrt(5) - 2) / 4
_KINDS = 3  # lengths of thinking, one after another


class TimedEpisode(CheckedEpisode):
    """Plays one episode of a world with a clock; each agent thinks for a fixed time."""

    def __init__(
        self,
        environment: ConcurrentEnvironment,
        script: Script,
        max_steps: int,
        timeout_seconds: float,
        last_first: bool = False,
    ) -> None:
        """Prepare an episode, to be played on an event loop of virtual time.

        Args:
            timeout_seconds: limit for the world to show an observation, if longer than the world lasts.
            last_first: whether agents asked last think for the shortest time.
        """
        self._world = cast("ContinuousEnvironment", environment)
        lasts = self._world.tick_seconds * self._world.ticks
        super().__init__(environment, script, max_steps, max(timeout_seconds, 2 * lasts), last_first)
        # In a world that lasts for long, agents think for longer, so that the actions are not too many.
        self._unit = max(self._world.tick_seconds, 4 * lasts * max(len(self._world.roles), 1) / max_steps)
        self._thinking: set[asyncio.Task[None]] = set()

    async def _next(self) -> Observation | None:
        while self._open:
            thinking = asyncio.ensure_future(self._answer(self._open.pop(next(iter(self._open)))))
            self._thinking.add(thinking)
            thinking.add_done_callback(self._thinking.discard)
        found = await super()._next()
        if found is None:
            for thinking in self._thinking:
                thinking.cancel()
        return found

    async def _answer(self, observation: Observation) -> None:
        """Answer an observation after the agent's thinking time, unless the world no longer waits for it."""
        roles = self._world.roles
        place = roles.index(observation.agent) if observation.agent in roles else len(roles)
        place = len(roles) - 1 - place if self._last_first else place
        longer = _LONGER * (self.acted[observation.agent] % _KINDS)
        await asyncio.sleep(self._unit * (_FIRST + _NEXT * place + longer))
        if not self._world.is_withdrawn(observation.id):
            self._act(observation)


def episodes_of(environment: ConcurrentEnvironment) -> Callable[..., CheckedEpisode]:
    """Return the class that plays a checked episode of this environment."""
    return TimedEpisode if isinstance(environment, ContinuousEnvironment) else CheckedEpisode
