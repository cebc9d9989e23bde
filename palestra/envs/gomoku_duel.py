"""Gomoku of two agents: each sees the board after the other's move, in a conversation of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.gomoku import AGENT, OPPONENT, Board
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage, Observation, text_message

STONES = {"agent": AGENT, "opponent": OPPONENT}
WON, DRAWN, LOST, IMPOSSIBLE = 1.0, 0.5, 0.0, -0.5


class GomokuDuel(ConcurrentEnvironment):
    """The agents `agent` and `opponent` take turns; `roles.opponent` says which policy plays the second one.

    A move is two numbers, row and column from 1. Rewards of each agent: won 1, drawn 0.5, lost 0. An impossible move
    ends the game with -0.5 for who made it, and 0.5 for the other, as a draw: it did not win.

    The task may have `size`, `to_win`, and `first` (`agent`, or `opponent`).
    """

    reusable = True

    def __init__(self, *, size: int = 3, to_win: int = 3, clock: Clock | None = None) -> None:
        """Set what holds where the task does not say it.

        Args:
            size: rows, and columns.
            to_win: stones in a row that win.
            clock: tells when something was observed.

        Raises:
            ValueError: it can't be played.
        """
        super().__init__(clock)
        self._defaults = {"size": size, "to_win": to_win}
        Board(size, to_win)

    async def start(self, task: Mapping[str, Any]) -> None:
        """Empty the board, and show it to the agent that begins."""
        settings = self._defaults | dict(task)
        self._board = Board(int(settings["size"]), int(settings["to_win"]))
        self._shown: dict[str, str] = {}  # the observation that each agent has answered last, or is to answer
        self._show("opponent" if task.get("first", "agent") == "opponent" else "agent")

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Put a stone, and show the board to the other agent, or end the game."""
        board, name = self._board, observation.agent
        other = "opponent" if name == "agent" else "agent"
        move = board.move(action.text)
        if move is None:
            self._end({name: IMPOSSIBLE, other: DRAWN}, f"{name}: impossible move")
            return
        board.put(*move, STONES[name])
        if board.wins(*move):
            self._end({name: WON, other: LOST}, f"{name} won")
        elif not board.free:
            self._end({name: DRAWN, other: DRAWN}, "drawn")
        else:
            self._show(other, observation.id)

    def _show(self, name: str, cause: str | None = None) -> None:
        """Show the board to an agent, the rules before it if it has not been shown."""
        text = str(self._board) if name in self._shown else f"{self._board.rules(STONES[name])}\n{self._board}"
        parents = tuple(known for known in (self._shown.get(name), cause) if known is not None)
        self._shown[name] = self.emit(name, (text_message("user", text),), parents=parents).id

    def _end(self, rewards: Mapping[str, float], result: str) -> None:
        """Give each agent its reward, for its own last move; one that has not moved has none to be rewarded for."""
        for name, reward in rewards.items():
            parents = (self._shown[name],) if name in self._shown else ()
            self.emit(name, (), parents=parents, reward=reward, terminated=True, info={"result": result})
