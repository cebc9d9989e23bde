"""The truth about policies of Kuhn poker: exact values, best responses and exploitability, from all six deals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from palestra_worlds.kuhn_poker import BET, PASS

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
