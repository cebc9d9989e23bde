"""Environment `kuhn-poker`: the smallest poker, whose optimal play is known (Kuhn 1950), with OpenSpiel's rules."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, turns
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage

PASS, BET = "p", "b"
_RULES = (
    "Kuhn poker. There are the cards 0, 1 and 2; the higher one wins. You have put 1 into the pot. You see your card "
    "and the moves so far: p passes, or folds after a bet; b bets 1, or calls a bet. Reply p or b."
)


class KuhnPoker(MultiAgentEnvironment):
    """Two players, three cards, one bet; a player sees its own card and the moves so far, as in `0pb`.

    That is OpenSpiel's information state. The rewards are wins and losses, from -2 to 2, and sum to 0. A late reply
    loses the player's stake, and so does an illegal one unless replies are restricted to the moves.

    The task has `seed`, which deals the cards, or `cards`: those of the first and the second player.
    """

    reusable = True
    roles = ("first", "second")
    zero_sum = True
    gives_choices = True
    moves = (PASS, BET)
    forfeits = frozenset({Fault.ILLEGAL, Fault.LATE})

    def __init__(self, *, rules: bool = False, clock: Clock | None = None) -> None:
        """Create the environment.

        Args:
            rules: whether a player reads the rules before its first card; not needed by a model trained from scratch.
            clock: source of observation times; None: the system's clock.
        """
        super().__init__(clock)
        self._rules = rules

    def begin(self, task: Mapping[str, Any]) -> None:
        """Deal a card to each player.

        Raises:
            ValueError: the task's `cards` are not two different ones of 0, 1 and 2.
        """
        cards = task.get("cards")
        if cards is None:
            cards = random.Random(int(task.get("seed", 0))).sample(range(3), 2)
        if len(cards) != 2 or cards[0] == cards[1] or not {*cards} <= {0, 1, 2}:
            raise ValueError(f"two different cards of 0, 1 and 2 are dealt, not {cards!r}")
        self._cards = dict(zip(self.roles, cards, strict=True))
        self._moves = ""

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return turns; the first player may act a second time, after pass and bet."""
        return turns(self.roles)

    def rules(self, role: str) -> str:
        """Return the rules, if configured."""
        return _RULES if self._rules else ""

    def view(self, role: str) -> str:
        """Return the player's card and the moves so far."""
        return f"{self._cards[role]}{self._moves}"

    def legal(self, role: str) -> Sequence[str]:
        """Return both moves: they are always legal."""
        return self.moves

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome | None:
        """Make a move, and pay if it was the last."""
        ((role, action),) = actions.items()
        self._moves += action.text
        other = _other(role)
        if self._moves in ("pp", "bb", "pbb"):
            winner = max(self.roles, key=self._cards.__getitem__)
            return _paid(winner, 1 if self._moves == "pp" else 2, self._moves)
        return _paid(other, 1, self._moves) if self._moves in ("bp", "pbp") else None

    def forfeit(self, role: str, fault: Fault) -> Outcome:
        """Return the loss of the player's stake, which is 1 before each of its moves, like a fold."""
        return _paid(_other(role), 1, f"{role}: {fault}")


def _other(role: str) -> str:
    return "second" if role == "first" else "first"


def _paid(winner: str, amount: int, result: str) -> Outcome:
    rewards = {winner: float(amount), _other(winner): -float(amount)}
    return Outcome(rewards=rewards, over=True, info={"result": result})
