"""The outcome of each task on which models are scored; means with intervals.

All formulas are closed forms over a handful of numbers, so that no library of statistics is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from palestra.errors import ConfigError
from palestra.types.metrics import NORMAL_95, of_policy
from palestra.types.records import Trajectory


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of independent values, such as one per seed, task or game.

    Attributes:
        half: half the width of the 95 confidence interval of the mean, by Student's t; None: there is only one value.
    """

    mean: float
    half: float | None
    count: int


def student_t(t: float, degrees: int) -> float:
    """Return the probability that Student's t is between -t and t (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4). `t`:
    at least 0. `degrees`: at least 1.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if degrees % 2 else 1.0
    total = 0.0 if degrees == 1 else term
    # The exponents of the cosine are odd for odd degrees of freedom, and even for even ones, up to degrees - 2.
    for power in range(3 if degrees % 2 else 2, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if degrees % 2 else sine * total


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return the t for which Student's t is between -t and t with this probability, by bisection. `probability`: at
    least 0, below 1. `degrees`: at least 1.
    """
    low, high = 0.0, 1.0
    while student_t(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values, with its 95 interval."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, t_quantile(0.95, count - 1) * standard_error(values), count)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values, at least two."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


MEAN = "validation/reward_mean"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOutcome:
    """The outcome of one task of an evaluation: its reward, or why there is none."""

    task_id: str
    episode_id: str
    # Sum of the rewards of agents that no frozen policy plays. None: every attempt failed; or several policies are
    # scored, of which each has its own in `by_policy`; or the policy of `Evaluation.of` has not played.
    reward: float | None
    reason: str | None  # why the last attempt failed; None if there are rewards
    trajectory: Trajectory | None = None  # messages, tokens, logprobs and steps; None unless they were asked for
    by_policy: Mapping[str, float] = field(default_factory=dict)  # where several policies are scored: of each its sum
    by_agent: Mapping[str, float] = field(default_factory=dict)  # the reward of each agent, whichever policy plays it
    replays: int = 0  # attempts that failed and were played again, so that the reward is that of a later one


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The outcomes of all tasks, in their order, with their mean and its confidence interval."""

    outcomes: tuple[TaskOutcome, ...]
    complete: bool  # False: the evaluation was stopped before its end
    policies: tuple[str, ...] = ()  # the policies that are scored, where there are several
    note: str | None = None  # what has to be known to read the mean; None: nothing

    def __repr__(self) -> str:
        """Return the mean in a line, with the number of outcomes instead of the outcomes."""
        means = [f"{name}={_number(self.of(name).mean)}" for name in self.policies] or [self._said()]
        scored = f"{self.scored} of {len(self.outcomes)} tasks scored"
        note = "" if self.note is None else f", note={self.note!r}"
        replayed = f", {self.replayed}" if self.replays else ""
        return f"Evaluation({', '.join(means)}, {scored}{replayed}, complete={self.complete}{note})"

    def _said(self) -> str:
        between = "" if self.interval is None else ", interval=({:.4g}, {:.4g})".format(*self.interval)
        return f"mean={_number(self.mean)}{between}"

    @property
    def scored(self) -> int:
        """Return the number of tasks with rewards."""
        return sum(outcome.reward is not None or bool(outcome.by_policy) for outcome in self.outcomes)

    @property
    def replays(self) -> int:
        """Return how many failed attempts were retried."""
        return sum(outcome.replays for outcome in self.outcomes)

    @property
    def replayed(self) -> str:
        """Describe how many attempts were retried."""
        return replayed_words(self.replays)

    def of(self, policy: str) -> Evaluation:
        """Return the evaluation of one of several policies that were scored together, with its own rewards.

        A task in which the policy did not play has no reward, and is not in its mean.

        Raises:
            ConfigError: the policy was not scored.
        """
        if policy not in self.policies:
            known = ", ".join(map(repr, self.policies)) or "one policy alone"
            raise ConfigError(f"{policy!r} was not scored; scored was {known}")
        outcomes = (replace(one, reward=one.by_policy.get(policy), by_policy={}) for one in self.outcomes)
        return Evaluation(outcomes=tuple(outcomes), complete=self.complete)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the mean rewards under their names in training, such as `white/validation/reward_mean`."""
        each = {of_policy(MEAN, name): self.of(name).mean for name in self.policies} or {MEAN: self.mean}
        return {name: mean for name, mean in each.items() if mean is not None}

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the scored tasks.

        Raises:
            ConfigError: several policies were scored, each with its own rewards; see `of`.
        """
        if self.policies:
            names = " and ".join(map(repr, self.policies))
            raise ConfigError(
                f"{names} were scored, each with rewards of its own: take those of one, of({self.policies[0]!r})"
            )
        return [outcome.reward for outcome in self.outcomes if outcome.reward is not None]

    @property
    def by_agent(self) -> dict[str, float]:
        """Return the mean reward of each agent, whichever policy plays it, over the tasks in which it has one."""
        known: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            for agent, reward in outcome.by_agent.items():
                known.setdefault(agent, []).append(reward)
        return {agent: math.fsum(rewards) / len(rewards) for agent, rewards in sorted(known.items())}

    @property
    def mean(self) -> float | None:
        """Return the mean reward of the scored tasks, or None without one; see `of`."""
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 confidence interval of the mean over tasks; None: it cannot be estimated.

        If all rewards, including opponents', are 0 or 1, this is Wilson's score interval (1927), which is also defined
        for equal rewards. Otherwise it is Student's t interval, or None if all rewards are equal, as in a game that was
        always won. With fewer than two rewards it is None.
        """
        rewards, mean = self.rewards, self.mean
        count = len(rewards)
        if count < 2 or mean is None:
            return None
        scored = [outcome for outcome in self.outcomes if outcome.reward is not None]
        if {*rewards, *(reward for outcome in scored for reward in outcome.by_agent.values())} <= {0.0, 1.0}:
            square = NORMAL_95**2
            middle = (mean + square / (2 * count)) / (1 + square / count)
            root = math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
            half = NORMAL_95 * root / (1 + square / count)
            return max(0.0, middle - half), min(1.0, middle + half)
        if min(rewards) == max(rewards):
            return None
        error = estimate(rewards).half
        return None if error is None else (mean - error, mean + error)


def replayed_words(replays: int) -> str:
    """Describe how many attempts were retried."""
    return f"{replays} attempt{' was' if replays == 1 else 's were'} played again"


def _number(mean: float | None) -> str:
    return "None" if mean is None else f"{mean:.4g}"
