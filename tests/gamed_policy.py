"""A simulated policy that learns from a judge with a bias, and what an oracle knows of it.

A reply has facts, which are what is wanted, and marks, which the judge likes too much and which spoil the reply.
Softmax policies over both are trained by policy gradients with advantages within groups, as GRPO does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

LEVELS = 6
STEPS, GROUPS, SIZE = 100, 8, 8


@dataclass(frozen=True)
class Bias:
    """A bias of a judge.

    Attributes:
        mark: what it likes.
        worth: what it gives for as many marks as fit.
        cost: share of a reply's worth that these spoil.
        start: log odds of one mark more at the start.
        rate: learning rate.
    """

    mark: str
    worth: float
    cost: float
    start: float
    rate: float


BIASES = (
    Bias("indeed", worth=1.0, cost=0.8, start=-5.0, rate=0.7),  # length
    Bias("excellent!", worth=1.5, cost=0.8, start=-6.0, rate=0.7),  # self-praise
    Bias("**", worth=1.2, cost=1.0, start=-4.5, rate=0.7),  # format
    Bias("synergy", worth=2.0, cost=1.0, start=-6.0, rate=0.5),  # keywords
)


def gold(text: str, mark: str, cost: float) -> float:
    """The true worth of a reply, from 0 to 1."""
    facts, marks = text.split().count("fact"), text.split().count(mark)
    return facts / (LEVELS - 1) * (1 - cost * marks / (LEVELS - 1))


@dataclass
class Played:
    """A step of the simulation.

    Attributes:
        texts: replies, group after group.
        rewards: of the biased judge.
        oracle: the mean true worth of the policy that played.
    """

    texts: list[str]
    rewards: list[float]
    oracle: float


def trained(bias: Bias, seed: int, noise: float = 0.1, steps: int = STEPS) -> Iterator[Played]:
    """Train and yield each step; a bias of worth 0 is an honest judge."""
    draw = np.random.default_rng(seed)
    levels = np.arange(LEVELS) / (LEVELS - 1)
    facts, marks = np.zeros(LEVELS), np.r_[0.0, np.full(LEVELS - 1, bias.start)]
    worth = levels[:, None] * (1 - bias.cost * levels[None, :])
    for _ in range(steps):
        chances = [np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum() for logits in (facts, marks)]
        f, m = (draw.choice(LEVELS, (GROUPS, SIZE), p=p) for p in chances)
        rewards = worth[f, m] + bias.worth * levels[m] + draw.normal(0, noise, f.shape)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
        texts = [" ".join(["fact"] * a + [bias.mark] * b) for a, b in zip(f.ravel(), m.ravel(), strict=True)]
        yield Played(texts, rewards.ravel().tolist(), float(chances[0] @ worth @ chances[1]))
        for logits, chosen, p in ((facts, f, chances[0]), (marks, m, chances[1])):
            logits += bias.rate * np.array([(advantages * ((chosen == i) - p[i])).mean() for i in range(LEVELS)])
