"""Environments `kuhn-poker`, whose optimal play is known (Kuhn 1950), and `leduc-poker`, with OpenSpiel's rules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, decided, turns
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage

PASS, BET = "p", "b"
_RULES = (
    "Kuhn poker. There are the cards 0, 1 and 2; the higher one wins. You have put 1 into the pot. You see your card "
    "and the moves so far: p passes, or folds after a bet; b bets 1, or calls a bet. Reply p or b."
)


class _Poker(MultiAgentEnvironment):
    """A game of two players with fixed moves, whose rules can be shown. `rules_text` has them."""

    reusable = True
    roles = ("first", "second")
    zero_sum = True
    gives_choices = True
    rules_text: ClassVar[str]
    forfeits = frozenset({Fault.ILLEGAL, Fault.LATE})

    def __init__(self, *, rules: bool = False, clock: Clock | None = None) -> None:
        """Create the environment.

        Args:
            rules: whether a player reads the rules before its first card; not needed by a model trained from scratch.
            clock: source of observation times; None: the system's clock.
        """
        super().__init__(clock)
        self._rules = rules

    def rules(self, role: str) -> str:
        """Return the rules, if configured."""
        return self.rules_text if self._rules else ""


class KuhnPoker(_Poker):
    """Two players, three cards, one bet; a player sees its own card and the moves so far, as in `0pb`.

    That is OpenSpiel's information state. The rewards are wins and losses, from -2 to 2, and sum to 0. A late reply
    loses the player's stake, and so does an illegal one unless replies are restricted to the moves.

    The task has `seed`, which deals the cards, or `cards`: those of the first and the second player.
    """

    moves = (PASS, BET)
    rules_text = _RULES

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


FOLD, CALL, RAISE = "f", "c", "r"
RANKS = "JQK"
_ANTE, _STAKES, _MOST_RAISES = 1, (2, 4), 2
_LEDUC_RULES = (
    "Leduc poker. There are two of each card J, Q and K. You see your card and the moves; after the first round also "
    "a card for both. A pair with it wins, else the higher card. f folds, c checks or calls, r raises by 2, in the "
    "second round by 4, at most twice a round. Reply f, c or r."
)


class LeducPoker(_Poker):
    """Two players; a player sees its card, and the moves of both rounds with the common card, as in `Qcrc/Kr`.

    The rewards are wins and losses, from -13 to 13, and sum to 0. A late reply loses the player's stake, and so does an
    illegal one unless replies are restricted to the legal moves.

    The task has `seed`, which deals the cards, or `cards`: three numbers from 0 to 5 (two of each rank), of the first
    player, the second player, and both.
    """

    moves = (FOLD, CALL, RAISE)
    rules_text = _LEDUC_RULES

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
