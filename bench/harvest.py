"""A world with a clock of its own: fruit ripens at each tick, and the agents take it when they act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.envs.continuous import ContinuousEnvironment
from palestra.envs.multi_agent import Outcome
from palestra.envs.protocols import AgentProtocol, free, simultaneous
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage

TAKE, WAIT = "t", "w"


class Harvest(ContinuousEnvironment):
    """One piece of fruit ripens at each tick. An agent sees how much is there; `t` takes all of it, `w` waits.

    Agents that act at the same time share the fruit. The reward of each is its part of all fruit. With `least` above 1
    there is something to learn: taking fewer than `least` pieces spoils them, and earns 0.
    """

    reusable = True
    gives_choices = True
    moves = (TAKE, WAIT)

    def __init__(
        self,
        *,
        agents: int = 2,
        tick_seconds: float = 0.1,
        ticks: int = 50,
        barriers: bool = False,
        least: int = 1,
        clock: Clock | None = None,
    ) -> None:
        """Create the environment; the roles are `agent-0`, `agent-1`, … `barriers`: whether all agents act at the same
        time, and wait for the slowest. `least`: smallest number of pieces that can be taken.
        """
        super().__init__(tick_seconds=tick_seconds, ticks=ticks, clock=clock)
        self.roles = tuple(f"agent-{number}" for number in range(agents))
        if least < 1:
            raise ValueError(f"least = {least}: at least 1 piece")
        self.barriers, self.least = barriers, least

    def begin(self, task: Mapping[str, Any]) -> None:
        """Begin without fruit."""
        self.ripe = 0

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return no order, or a barrier before each action."""
        return simultaneous() if self.barriers else free()

    def tick(self) -> None:
        """Let a piece of fruit ripen."""
        self.ripe += 1

    def view(self, role: str) -> str:
        """Return how much fruit there is."""
        return str(self.ripe)

    def legal(self, role: str) -> Sequence[str]:
        """Return both moves."""
        return self.moves

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome | None:
        """Distribute the fruit among the agents that take it."""
        takers = [role for role, action in actions.items() if action.text == TAKE]
        if not takers or not self.ripe:
            return None
        share = self.ripe / len(takers) / self.ticks if self.ripe >= self.least else 0.0
        self.ripe = 0
        return Outcome(rewards=dict.fromkeys(takers, share))
