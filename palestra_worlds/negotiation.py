"""Environment `negotiation`: two agents divide things that each values in private (Lewis et al. 2017, simplified)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, turns
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage

ACCEPT, WALK_AWAY = "y", "n"
_KINDS, _MOST, _WORTH = 3, 3, 10
_RULES = (
    "Two players divide things of three kinds. You see how many there are of each kind, what one of each is worth to "
    "you (all together 10), and what the other wants for itself. Reply with what you want of each kind, as in 201, or "
    "y to take the rest that the other leaves, or n to leave without a deal. There are {offers} turns."
)


class Negotiation(MultiAgentEnvironment):
    """The roles make offers in turns: the number of each kind that the speaker wants, as in `201`; `y` accepts, `n`
    ends it.

    A player sees the numbers of things, their worth to itself, and the other's last offer, as in `212 315 201`, or `-`
    without an offer. The reward is the worth of a player's things as a part of all, from 0 to 1. Without a deal, or
    after an illegal or late reply, both get 0.

    The task has `seed`, which determines things and their worth.
    """

    reusable = True
    roles = ("first", "second")
    gives_choices = True
    moves = (*("".join(map(str, offer)) for offer in product(range(_MOST + 1), repeat=_KINDS)), ACCEPT, WALK_AWAY)
    forfeits = frozenset({Fault.ILLEGAL, Fault.LATE})

    def __init__(self, *, offers: int = 6, rules: bool = False, clock: Clock | None = None) -> None:
        """Create the environment.

        Args:
            offers: turns of both together; without a deal after these both get 0.
            rules: whether a player reads the rules before its first turn.
            clock: source of observation times; None: the system's clock.

        Raises:
            ValueError: `offers` is below 2.
        """
        super().__init__(clock)
        if offers < 2:
            raise ValueError(f"an offer and its answer are two turns, and there are {offers}")
        self._offers, self._rules = offers, rules

    def begin(self, task: Mapping[str, Any]) -> None:
        """Draw the things, and their worth to each role."""
        source = random.Random(int(task.get("seed", 0)))
        self._counts = [source.randint(1, _MOST) for _ in range(_KINDS)]
        while _WORTH % math.gcd(*self._counts):  # three of each kind can't be worth 10
            self._counts = [source.randint(1, _MOST) for _ in range(_KINDS)]
        self._worth = {role: _draw_worth(source, self._counts) for role in self.roles}
        self._offer = ""
        self._left = self._offers

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return turns; the first role begins."""
        return turns(self.roles)

    def rules(self, role: str) -> str:
        """Return the rules, if configured."""
        return _RULES.format(offers=self._offers) if self._rules else ""

    def view(self, role: str) -> str:
        """Return the things, their worth to the role, and the other's offer."""
        return f"{_digits(self._counts)} {_digits(self._worth[role])} {self._offer or '-'}"

    def legal(self, role: str) -> Sequence[str]:
        """Return every division, and the answers to an offer, if there is one."""
        offers = (_digits(offer) for offer in product(*(range(count + 1) for count in self._counts)))
        return (*offers, *((ACCEPT,) if self._offer else ()), WALK_AWAY)

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome | None:
        """Make an offer, or end the negotiation."""
        ((role, action),) = actions.items()
        self._left -= 1
        if action.text == ACCEPT:
            other = "second" if role == "first" else "first"
            taken = [*map(int, self._offer)]
            rest = [count - number for count, number in zip(self._counts, taken, strict=True)]
            rewards = {role: self._value(role, rest), other: self._value(other, taken)}
            return Outcome(rewards=rewards, over=True, info={"result": f"{other} gets {self._offer}"})
        if action.text == WALK_AWAY or not self._left:
            return _no_deal(f"{role} walked away" if action.text == WALK_AWAY else "no turns left")
        self._offer = action.text
        return None

    def forfeit(self, role: str, fault: Fault) -> Outcome:
        """Return that there is no deal."""
        return _no_deal(f"{role}: {fault}")

    def _value(self, role: str, share: Sequence[int]) -> float:
        return sum(worth * number for worth, number in zip(self._worth[role], share, strict=True)) / _WORTH


def _draw_worth(source: random.Random, counts: Sequence[int]) -> list[int]:
    """Draw the worth of one thing of each kind, below 10 each, so that all things together are worth 10."""
    fitting = [
        list(worth)
        for worth in product(range(10), repeat=_KINDS)
        if sum(one * count for one, count in zip(worth, counts, strict=True)) == _WORTH
    ]
    return source.choice(fitting)


def _digits(numbers: Sequence[int]) -> str:
    return "".join(map(str, numbers))


def _no_deal(result: str) -> Outcome:
    return Outcome(rewards={"first": 0.0, "second": 0.0}, over=True, info={"result": result})
