"""Agents whose actions come from external workers."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.agents import Agent, ModelAgent, PolicyHandle
from palestra.session.seat_table import SeatTable
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, Observation


class SeatAgent(Agent):
    """Passes each observation to the external player's worker, and waits for its action."""

    def __init__(self, table: SeatTable, player: Agent) -> None:
        """Create the agent of one episode.

        Args:
            player: replaces a worker with the policy of the role, if configured.
        """
        self._table, self._player = table, player

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Return the action of the worker, whose model calls the session has recorded, or that of the policy."""
        action = await self._table.ask(observation)
        if action is None:
            return await self._player.step(observation, policy)
        return [], action


def with_seats(agents: Mapping[str, Agent], table: SeatTable, roles: tuple[str, ...]) -> dict[str, Agent]:
    """Return the agents of an episode, with a `SeatAgent` for each external player.

    Args:
        agents: by name; "" plays all others.
    """
    players = {role: agents.get(role) or agents.get("") or ModelAgent() for role in roles}
    return {**agents, **{role: SeatAgent(table, player) for role, player in players.items()}}
