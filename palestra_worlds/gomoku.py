"""Environment `gomoku`: the first to have `to_win` stones in a row wins; the opponent is part of the world."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Literal

from palestra.envs.environment import Environment
from palestra.envs.multi_agent import MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, turns
from palestra.envs.tasks import Split, draw_tasks
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage

_NUMBER = re.compile(r"\d+")
_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))
EMPTY, AGENT, OPPONENT = ".", "X", "O"


class Board:
    """A square board with the stones of both players, and the winning row length."""

    def __init__(self, size: int, to_win: int) -> None:
        if not 2 <= to_win <= size <= 19:
            raise ValueError(f"a board of {size} with {to_win} in a row can't be played")
        self.size, self.to_win = size, to_win
        self._stones = [[EMPTY] * size for _ in range(size)]

    def __str__(self) -> str:
        """Return the board as text."""
        return "\n".join("".join(line) for line in self._stones)

    def rules(self, stone: str) -> str:
        """Return the rules for the player with these stones."""
        return f"You are {stone}. {self.to_win} in a row win. Move: row column, from 1 to {self.size}."

    def move(self, text: str) -> tuple[int, int] | None:
        """Return the last free (row, column), from 0, that a text names; None: it names none."""
        said = _NUMBER.findall(text)[-2:]
        if len(said) < 2 or max(map(len, said)) > 9:  # Python refuses numbers of thousands of digits
            return None
        row, column = (int(number) - 1 for number in said)
        inside = 0 <= row < self.size and 0 <= column < self.size
        return (row, column) if inside and self._stones[row][column] == EMPTY else None

    def put(self, row: int, column: int, stone: str) -> None:
        """Place or remove a stone. `stone`: `AGENT`, `OPPONENT`, or `EMPTY` to remove one."""
        self._stones[row][column] = stone

    @property
    def free(self) -> list[tuple[int, int]]:
        """Return all free positions, row by row."""
        size = range(self.size)
        return [(row, column) for row in size for column in size if self._stones[row][column] == EMPTY]

    def wins(self, row: int, column: int) -> bool:
        """Return whether the stone at this position is in a row that is long enough."""
        stone = self._stones[row][column]
        for down, right in _DIRECTIONS:
            length = 1
            for sign in (1, -1):
                y, x = row + sign * down, column + sign * right
                while 0 <= y < self.size and 0 <= x < self.size and self._stones[y][x] == stone:
                    length, y, x = length + 1, y + sign * down, x + sign * right
            if length >= self.to_win:
                return True
        return False


class Gomoku(Environment):
    """A board game in which a move is two numbers, row and column from 1.

    Rewards: won 1, drawn 0.5, lost 0, an impossible move -0.5; each ends the episode. A task may have the keys `size`,
    `to_win` and `opponent`, `first` (`agent` or `opponent`) and `seed` of the opponent's moves (default 0).
    """

    blocking = False
    reusable = True
    forfeit_reward = -0.5

    def __init__(self, *, size: int = 3, to_win: int = 3, opponent: Literal["random", "greedy"] = "random") -> None:
        """Create the environment with defaults for tasks that do not set them.

        Args:
            size: rows and columns of the board, at most 19.
            to_win: stones in a row that win.
            opponent: `random`, or `greedy`, which wins if it can and else prevents the agent's win.

        Raises:
            ValueError: no game can be played with these settings.
        """
        self._defaults = {"size": size, "to_win": to_win, "opponent": opponent}
        Board(size, to_win)
        _check(opponent)

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin a game on an empty board; the opponent moves first if the task says so.

        Raises:
            ValueError: no game can be played with the task's settings.
        """
        settings = self._defaults | dict(task)
        self._board = Board(int(settings["size"]), int(settings["to_win"]))
        _check(settings["opponent"])
        self._greedy = settings["opponent"] == "greedy"
        self._draw = random.Random(int(task.get("seed", 0)))
        if task.get("first", "agent") == "opponent":
            self._board.put(*self._answer(), OPPONENT)
        return f"{self._board.rules(AGENT)}\n{self._board}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make the agent's move, then the opponent's, and return the board."""
        board, move = self._board, self._board.move(action)
        if move is None:
            return "impossible move", -0.5, True, False, {"result": "impossible"}
        for stone, place in ((AGENT, move), (OPPONENT, None)):
            at = place or self._answer()
            board.put(*at, stone)
            if board.wins(*at):
                won = stone == AGENT
                return str(board), 1.0 if won else 0.0, True, False, {"result": "won" if won else "lost"}
            if not board.free:
                return str(board), 0.5, True, False, {"result": "drawn"}
        return str(board), 0.0, False, False, {}

    def _answer(self) -> tuple[int, int]:
        """Return the opponent's move: a winning one, else one that keeps the agent from winning, else a random one."""
        free = self._board.free
        if self._greedy:
            for stone in (OPPONENT, AGENT):
                for place in free:
                    self._board.put(*place, stone)
                    wins = self._board.wins(*place)
                    self._board.put(*place, EMPTY)
                    if wins:
                        return place
        return self._draw.choice(free)


def _check(opponent: str) -> None:
    if opponent not in ("random", "greedy"):
        raise ValueError(f"an opponent is random or greedy, and {opponent!r} can't be played")


def gomoku_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw games: the first player, and the seed of the opponent's moves; keys `id`, `first` and `seed`.

    All games start from the same empty board, so the splits differ only in seeds. An opponent that draws the same moves
    for two seeds plays the same game: on the smallest boards a validation game may equal a training game.
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    number = source.randrange(2**31)
    return {"id": f"gomoku-{number}", "first": ("agent", "opponent")[number % 2], "seed": number}


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
        """Create the environment with defaults for tasks that do not set them."""
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
