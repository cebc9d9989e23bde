"""Gomoku of two agents: each sees the board after the other's move, in a conversation of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.envs.multi_agent import MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, turns
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage
from palestra_worlds.gomoku import AGENT, OPPONENT, Board

STONES = {"agent": AGENT, "opponent": OPPONENT}
WON, DRAWN, LOST, IMPOSSIBLE = 1.0, 0.5, 0.0, -0.5


class GomokuDuel(MultiAgentEnvironment):
    """The agents `agent` and `opponent` take turns; `roles.opponent` chooses the second one's policy.

    A move is two numbers, row and column from 1. Rewards of each agent: won 1, drawn 0.5, lost 0. An impossible move
    ends the game with -0.5 for its player, and 0.5 for the other, as in a draw.

    The task may have `size`, `to_win`, and `first` (`agent`, or `opponent`).
    """

    reusable = True
    roles = ("agent", "opponent")

    def __init__(self, *, size: int = 3, to_win: int = 3, clock: Clock | None = None) -> None:
        """Create the environment with defaults for tasks that do not set them.

        Raises:
            ValueError: it can't be played.
        """
        super().__init__(clock)
        self._defaults = {"size": size, "to_win": to_win}
        Board(size, to_win)

    def begin(self, task: Mapping[str, Any]) -> None:
        """Empty the board."""
        settings = self._defaults | dict(task)
        self._board = Board(int(settings["size"]), int(settings["to_win"]))

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return turns, in which the role that the task names as `first` begins."""
        return turns(self.roles[::-1] if task.get("first", "agent") == "opponent" else self.roles)

    def rules(self, role: str) -> str:
        """Return the rules for the role's stones."""
        return self._board.rules(STONES[role])

    def view(self, role: str) -> str:
        """Return the board."""
        return str(self._board)

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome | None:
        """Put a stone, and end the game if it is won or the board is full."""
        ((name, action),) = actions.items()
        board, other = self._board, "opponent" if name == "agent" else "agent"
        move = board.move(action.text)
        if move is None:
            return _end({name: IMPOSSIBLE, other: DRAWN}, f"{name}: impossible move")
        board.put(*move, STONES[name])
        if board.wins(*move):
            return _end({name: WON, other: LOST}, f"{name} won")
        return None if board.free else _end({name: DRAWN, other: DRAWN}, "drawn")


def _end(rewards: Mapping[str, float], result: str) -> Outcome:
    return Outcome(rewards=rewards, over=True, info={"result": result})
