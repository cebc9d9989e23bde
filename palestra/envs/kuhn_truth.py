"""The truth about policies of Kuhn poker: exact values, best responses and exploitability, from all six deals.

A policy is the probability of a bet in each of the twelve information states, named as `KuhnPoker` shows them: a card
and the moves so far, as in `0pb`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from palestra.envs.kuhn_poker import BET, PASS

Bets = Mapping[str, float]
DEALS = tuple(itertools.permutations(range(3), 2))
FIRST = tuple(f"{card}{moves}" for card in range(3) for moves in ("", "pb"))
SECOND = tuple(f"{card}{moves}" for card in range(3) for moves in ("p", "b"))
GAME_VALUE = -1 / 18  # of the first player, if both play perfectly (Kuhn 1950)


def value(bets: Bets) -> float:
    """Return the expected reward of the first player.

    Args:
        bets: probability of a bet in each of the twelve information states of both players.
    """
    return sum(_value(deal, "", bets) for deal in DEALS) / len(DEALS)


def best_responses(bets: Bets) -> tuple[float, float]:
    """Return the expected reward of each player who plays best against the other's policy.

    Args:
        bets: see `value`; a player's own part does not matter for its best response.
    """
    first = max(value({**bets, **own}) for own in _pure(FIRST))
    second = max(-value({**bets, **own}) for own in _pure(SECOND))
    return first, second


def exploitability(bets: Bets) -> float:
    """Return half of what best responses to both policies win together: 0 for perfect play, 0.458 if all is random."""
    return sum(best_responses(bets)) / 2


def _pure(states: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """Yield every policy of one player that is certain everywhere; one of them is a best response."""
    for chosen in itertools.product((0.0, 1.0), repeat=len(states)):
        yield dict(zip(states, chosen, strict=True))


def _value(deal: tuple[int, int], moves: str, bets: Bets) -> float:
    """Return the expected reward of the first player from the moves on."""
    if moves == "bp":
        return 1.0
    if moves == "pbp":
        return -1.0
    if moves in ("pp", "bb", "pbb"):
        return (1.0 if moves == "pp" else 2.0) * (1 if deal[0] > deal[1] else -1)
    bet = bets[f"{deal[len(moves) % 2]}{moves}"]
    return bet * _value(deal, moves + BET, bets) + (1 - bet) * _value(deal, moves + PASS, bets)
