"""Environment `kuhn-poker`: the smallest poker, whose optimal play is known (Kuhn 1950), with OpenSpiel's rules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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


ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class KuhnPolicy:
    """The policies of both players: the probability of a bet in each of the twelve information states.

    Attributes:
        bets: by information state, named as `KuhnPoker` shows it: a card and the moves so far, as in `0pb`. A
            probability may leave [0, 1] by `ROUNDING`, as sums of numbers do.
        deals: the cards of the first and the second player, of all six deals.
        first_states: information states of the first player.
        second_states: information states of the second player.
    """

    bets: Mapping[str, float]
    deals: ClassVar[tuple[tuple[int, int], ...]] = tuple(itertools.permutations(range(3), 2))
    first_states: ClassVar[tuple[str, ...]] = tuple(f"{card}{moves}" for card in range(3) for moves in ("", "pb"))
    second_states: ClassVar[tuple[str, ...]] = tuple(f"{card}{moves}" for card in range(3) for moves in ("p", "b"))

    def __post_init__(self) -> None:
        """Check that this is a policy."""
        states = {*self.first_states, *self.second_states}
        if missing := sorted(states - self.bets.keys()):
            raise ValueError(f"a policy of Kuhn poker has twelve information states; missing: {', '.join(missing)}")
        if unknown := sorted(map(str, self.bets.keys() - states)):
            raise ValueError(f"Kuhn poker has no information state {', '.join(unknown)}; it has {sorted(states)}")
        for state, bet in self.bets.items():
            if not -ROUNDING <= bet <= 1 + ROUNDING:  # NaN is refused, too
                raise ValueError(f"the probability of a bet in the information state {state!r} is {bet}, not 0 to 1")

    @property
    def value(self) -> float:
        """Return the expected reward of the first player; -1/18 if both play optimally (Kuhn 1950)."""
        return sum(self._value(deal, "") for deal in self.deals) / len(self.deals)

    @property
    def best_responses(self) -> tuple[float, float]:
        """Return each player's expected reward as the best response to the other's policy."""
        first = max(one.value for one in self._with_pure(self.first_states))
        second = max(-one.value for one in self._with_pure(self.second_states))
        return first, second

    @property
    def exploitability(self) -> float:
        """Return half of the sum of both best responses: 0 for optimal play, 0.458 if all moves are random."""
        return sum(self.best_responses) / 2

    def _with_pure(self, states: tuple[str, ...]) -> Iterator[KuhnPolicy]:
        """Yield the policy with every certain choice of one player; one of them is a best response."""
        for chosen in itertools.product((0.0, 1.0), repeat=len(states)):
            yield replace(self, bets={**self.bets, **dict(zip(states, chosen, strict=True))})

    def _value(self, deal: tuple[int, int], moves: str) -> float:
        """Return the expected reward of the first player from the moves on."""
        if moves == "bp":
            return 1.0
        if moves == "pbp":
            return -1.0
        if moves in ("pp", "bb", "pbb"):
            return (1.0 if moves == "pp" else 2.0) * (1 if deal[0] > deal[1] else -1)
        bet = self.bets[f"{deal[len(moves) % 2]}{moves}"]
        return bet * self._value(deal, moves + BET) + (1 - bet) * self._value(deal, moves + PASS)
