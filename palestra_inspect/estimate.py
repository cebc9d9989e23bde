"""What a job will take, from the first steps that `palestra check` has tried: tokens, hours and money."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from palestra.config import JobConfig
from palestra.config.budget import HOUR_MS, UNITS, device_price, token_prices
from palestra.runtime.scores import estimate
from palestra.store.spending import Used
from palestra_inspect.checking import CheckFinding
from palestra_inspect.trial import Trial, plays_episodes

DRIFT = 0.1  # replies become longer or shorter while a policy learns


class Interval(NamedTuple):
    """A number with bounds within which it is expected."""

    low: float
    mean: float
    high: float

    def shown(self, write: Callable[[float], str]) -> str:
        """Return the mean with its bounds."""
        return f"{write(self.mean)} ({write(self.low)} to {write(self.high)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEstimate:
    """What a whole job is expected to take, and what its first step has taken.

    Attributes:
        money: None: the job has no prices.
    """

    tokens: Interval
    hours: Interval
    money: Interval | None
    step_tokens: float
    step_hours: float
    step_money: float


def estimate_of(config: JobConfig, trial: Trial) -> JobEstimate | None:
    """Return what the whole job will take by a trial; None: no step of it was finished."""
    rows, used = trial.rows, trial.used
    if not rows:
        return None
    step, episodes = rows[-1], config.rollout.group_size * config.rollout.groups_per_step
    # An evaluation plays each held-out task once, and each of its episodes is like one of a step.
    evaluated = evaluations(config) * trial.held_out / episodes
    played, spread = config.steps + evaluated, _spread(used)
    began = trial.episodes / episodes if trial.stopped and plays_episodes(config) else 0.0  # steps
    tokens, money = _of_a_step(config, used, max(began, len(rows)))
    seconds = step["time/step_seconds"]
    start = max(trial.seconds - sum(row["time/step_seconds"] for row in rows), 0.0)
    whole = start + seconds * config.steps + step.get("time/rollout_seconds", 0.0) * evaluated
    unsteady = min(abs(rows[0]["time/step_seconds"] - seconds) / max(seconds, 1e-9) / 2, 0.5)
    pace = math.hypot(spread, unsteady)
    hours = _around(whole / 3600, pace)
    devices = device_price(config) * HOUR_MS / UNITS
    bought = _around(money * played, spread)
    sums = Interval(*(calls + devices * time for calls, time in zip(bought, hours, strict=True)))
    return JobEstimate(
        tokens=_around(tokens * played, spread),
        hours=hours,
        money=None if config.prices is None else sums,
        step_tokens=tokens,
        step_hours=seconds / 3600,
        step_money=money + devices * seconds / 3600,
    )


def evaluations(config: JobConfig) -> int:
    """Return how often a job that makes all of its steps evaluates, if it has tasks for that."""
    every = config.evaluation.every_steps
    if not config.evaluation.is_on:
        return 0
    return 2 if config.evaluation.every_tokens is not None else 1 + math.ceil(config.steps / every)


def budget_findings(config: JobConfig, found: JobEstimate) -> Iterator[CheckFinding]:
    """Yield a finding for each limit of the budget that ends the job early, or before its first step."""
    budget = config.budget
    if budget is None:
        return
    sums = {"tokens": (found.tokens, found.step_tokens), "hours": (found.hours, found.step_hours)}
    if found.money is not None:
        sums["money"] = (found.money, found.step_money)
    for name, (whole, step) in sums.items():
        if (limit := getattr(budget, name)) is None or limit >= whole.high:
            continue
        first = limit < step
        text = f"budget.{name} is {limit:,}, and " + (
            f"one step takes about {step:,.3g}: the job would end before its first"
            if first
            else f"the job takes about {whole.mean:,.3g} ({whole.low:,.3g} to {whole.high:,.3g}): it may end after "
            f"step {int(config.steps * limit / max(whole.mean, 1e-12)):,} of {config.steps:,}"
        )
        yield CheckFinding(key=f"budget.{name}", text=text, fatal=first)


def _of_a_step(config: JobConfig, used: Sequence[Used], steps: float) -> tuple[float, float]:
    """Return tokens, and the money for them, of a step."""
    prices = token_prices(config)
    return sum(one.tokens for one in used) / steps, sum(one.money(prices) for one in used) / UNITS / steps


def _spread(used: Sequence[Used]) -> float:
    """Return the relative half width of the interval of a job's tokens, by those of its episodes (Student's t)."""
    by_episode: defaultdict[str, int] = defaultdict(int)
    for one in used:
        if one.episode_id:
            by_episode[one.episode_id] += one.tokens
    if not any(by_episode.values()):
        return 1.0 if used else DRIFT
    found = estimate(list(by_episode.values()))
    return 1.0 if found.half is None else math.hypot(found.half / found.mean, DRIFT)


def _around(mean: float, share: float) -> Interval:
    return Interval(max(mean * (1 - share), 0.0), mean, mean * (1 + share))
