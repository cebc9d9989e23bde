"""Environments with a clock of their own: the world moves on while agents think, so who thinks longer acts later."""

from __future__ import annotations

import asyncio
import selectors
from abc import abstractmethod
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from palestra.envs.multi_agent import MultiAgentEnvironment, Outcome, awaited_result
from palestra.envs.protocols import AgentProtocol, free
from palestra.types.clock import Clock

Result = TypeVar("Result")


class ContinuousEnvironment(MultiAgentEnvironment):
    """A world of several agents that moves by ticks, whether or not an agent acts.

    By default there are no turns: each action is applied when it arrives, and its agent then sees the world again. With
    another `protocol`, such as `simultaneous()`, the same world has barriers. Episodes depend on how long agents think,
    so they are not deterministic; `check_environment` plays them in virtual time. `rollout.step_order = "acted"`
    credits actions in the order in which they were given.

    Time is the event loop's, so a test can use virtual time with `run_virtual`.
    """

    deterministic = False

    def __init__(self, *, tick_seconds: float, ticks: int, clock: Clock | None = None) -> None:
        """Create the environment.

        Args:
            tick_seconds: time between ticks.
            ticks: number of ticks in an episode.
            clock: source of observation times; None: the system's clock.

        Raises:
            ValueError: a number is not positive.
        """
        super().__init__(clock)
        if not tick_seconds > 0 or ticks < 1:
            raise ValueError(f"a world has at least one tick, of more than 0 s, not {ticks} of {tick_seconds} s")
        self.tick_seconds, self.ticks = tick_seconds, ticks

    @abstractmethod
    def tick(self) -> Outcome | Awaitable[Outcome | None] | None:
        """Advance the world by one tick; may reward and end like `apply`."""

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return `free()`: each agent acts when it is ready."""
        return free()

    async def start(self, task: Mapping[str, Any]) -> None:
        """Begin the world's episode, show the agents their views, and start the world's clock."""
        await super().start(task)
        self._work("the world's clock", self._run)

    def waits_only_for(self, observation_id: str) -> bool:
        """Return False: the next tick always comes."""
        return False

    async def _run(self) -> None:
        """Tick until the episode is over."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in range(1, self.ticks + 1):
            # By the beginning and not by the last tick, so that late ticks do not add up.
            await asyncio.sleep(begun + number * self.tick_seconds - loop.time())
            async with self._turnstile:
                if self._over:
                    return
                if (outcome := await awaited_result(self.tick())) is not None:
                    self._settle(outcome)
                if not self._over:
                    await self._advance()
                if number == self.ticks and not self._over:
                    self._end(self.final_outcome())


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait for timers: the time that an event loop would wait passes immediately."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (ready := super().select(0)) or timeout <= 0:
            return super().select(timeout) if timeout is None else ready
        self.now += timeout
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class LoopClock:
    """The running event loop's time as a clock, for `observed_at` in virtual time."""

    def now(self) -> float:
        """Return seconds since the loop's beginning."""
        return asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        """Return seconds since the loop's beginning."""
        return self.now()


def run_virtual(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a new event loop whose time jumps to the next timer when there is no other work.

    So `asyncio.sleep(3600)` takes no time, and results do not depend on the machine's speed. Threads do not hold time:
    it jumps while the loop waits for one of them.

    Args:
        work: a coroutine that waits only for timers and its own tasks.
    """
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
