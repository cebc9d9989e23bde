"""Environment `leduc-poker`: poker of two rounds and a card for both (Southey et al. 2005), with OpenSpiel's rules."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, decided
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage

FOLD, CALL, RAISE = "f", "c", "r"
RANKS = "JQK"
_ANTE, _STAKES, _MOST_RAISES = 1, (2, 4), 2
_RULES = (
    "Leduc poker. There are two of each card J, Q and K. You see your card and the moves; after the first round also "
    "a card for both. A pair with it wins, else the higher card. f folds, c checks or calls, r raises by 2, in the "
    "second round by 4, at most twice a round. Reply f, c or r."
)


class LeducPoker(MultiAgentEnvironment):
    """Two players; a player sees its card, and the moves of both rounds with the common card, as in `Qcrc/Kr`.

    The rewards are wins and losses, from -13 to 13, and sum to 0. A late reply loses the player's stake, and so does an
    illegal one unless replies are restricted to the legal moves.

    The task has `seed`, which deals the cards, or `cards`: three numbers from 0 to 5 (two of each rank), of the first
    player, the second player, and both.
    """

    reusable = True
    roles = ("first", "second")
    zero_sum = True
    gives_choices = True
    moves = (FOLD, CALL, RAISE)
    forfeits = frozenset({Fault.ILLEGAL, Fault.LATE})

    def __init__(self, *, rules: bool = False, clock: Clock | None = None) -> None:
        """Create the environment.

        Args:
            rules: whether a player reads the rules before its first card.
            clock: source of observation times; None: the system's clock.
        """
        super().__init__(clock)
        self._rules = rules

    def begin(self, task: Mapping[str, Any]) -> None:
        """Deal three cards; the last is revealed in the second round.

        Raises:
            ValueError: the task's `cards` are not three different numbers from 0 to 5.
        """
        cards = task.get("cards")
        if cards is None:
            cards = random.Random(int(task.get("seed", 0))).sample(range(6), 3)
        if len(cards) != 3 or len({*cards}) != 3 or not {*cards} <= {*range(6)}:
            raise ValueError(f"three different cards from 0 to 5 are dealt, not {cards!r}")
        self._ranks = [card // 2 for card in cards]
        self._paid = [_ANTE, _ANTE]
        self._lines = [""]  # the moves of each round

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return that the rules name the next player: the first player begins each round."""
        return decided(lambda: (self.roles[len(self._lines[-1]) % 2],))

    def rules(self, role: str) -> str:
        """Return the rules, if configured."""
        return _RULES if self._rules else ""

    def view(self, role: str) -> str:
        """Return the player's card, the moves, and the common card in the second round."""
        shown = f"/{RANKS[self._ranks[2]]}{self._lines[1]}" if len(self._lines) == 2 else ""
        return f"{RANKS[self._ranks[self.roles.index(role)]]}{self._lines[0]}{shown}"

    def legal(self, role: str) -> Sequence[str]:
        """Return the legal moves: folding needs a raise before it, and a round has at most two raises."""
        behind = self._paid[0] != self._paid[1]
        raises = self._lines[-1].count(RAISE) < _MOST_RAISES
        return (*((FOLD,) if behind else ()), CALL, *((RAISE,) if raises else ()))

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome | None:
        """Make a move; pay if the game is over, and reveal the common card after the first round."""
        ((role, action),) = actions.items()
        player, move = self.roles.index(role), action.text
        self._lines[-1] += move
        if move == FOLD:
            return self._won(1 - player)
        self._paid[player] = max(self._paid)
        if move == RAISE:
            self._paid[player] += _STAKES[len(self._lines) - 1]
            return None
        if self._lines[-1] == CALL:  # the other player has not moved in this round
            return None
        if len(self._lines) == 1:
            self._lines.append("")
            return None
        first, second, both = self._ranks
        strength = [(first == both, first), (second == both, second)]
        return self._won(None if first == second else strength.index(max(strength)))

    def forfeit(self, role: str, fault: Fault) -> Outcome:
        """Return the loss of the player's stake, like a fold."""
        return self._won(1 - self.roles.index(role), f"{role}: {fault}")

    def _won(self, winner: int | None, result: str = "") -> Outcome:
        """Return the end of the game; None: both have the same rank."""
        amount = 0.0 if winner is None else float(self._paid[1 - winner])
        first = amount if winner == 0 else -amount
        rewards = {"first": first, "second": -first}
        return Outcome(rewards=rewards, over=True, info={"result": result or "/".join(self._lines)})
