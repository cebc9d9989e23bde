"""`RandomAgent`: plays one of the legal moves, each equally often, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from palestra.agents.agent import Agent, PolicyHandle
from palestra.errors import InvalidEnvironment
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, Observation, text_message

Moves = Callable[[Observation], Sequence[str]]


class RandomAgent(Agent):
    """Plays a random legal move, determined by the job's seed, the episode, the agent and the TimeStep."""

    may_choose = False
    asks_policy = False

    def __init__(self, moves: Moves | None = None) -> None:
        """Create the agent.

        Args:
            moves: returns the legal moves of an observation, at least one; None: its `choices`.
        """
        self._moves = moves

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Return a legal move, without calling the policy.

        Raises:
            InvalidEnvironment: no move is legal.
        """
        moves = list(observation.choices if self._moves is None else self._moves(observation))
        if not moves:
            raise InvalidEnvironment(f"{observation.agent} has no legal move to draw one of")
        return [], text_message("assistant", random.Random(policy.seed).choice(moves))
