from __future__ import annotations

import math
import random

import pytest

from palestra.config import parse_config
from palestra.store.spending import Used
from palestra_inspect.estimate import budget_findings, estimate_of, evaluations
from palestra_inspect.trial import Trial

PRICES = {"device_hour": 3.6, "tokens": {"policy": [1, 2]}}


def config(**changes):
    rollout = {"group_size": 8, "groups_per_step": 4}
    return parse_config({"steps": 50, "rollout": rollout, "evaluation": {"every_steps": 0}} | changes)


def trial_of(seed: int, steps: int = 2, **changes) -> Trial:
    """Steps of 32 episodes with 40 tokens of a prompt and 1 to 60 of a reply."""
    draw = random.Random(seed)
    used = [Used(f"e{n}", "train", "policy", 1, 40, draw.randint(1, 60)) for n in range(32 * steps)]
    rows = [{"time/step_seconds": 10.0 + (not n), "time/rollout_seconds": 6.0} for n in range(steps)]
    return Trial(rows=rows, used=used, episodes=len(used), seconds=30.0, **changes)


def test_the_bounds_of_two_steps_hold_what_whole_jobs_take():
    inside, near = 0, 0
    for seed in range(40):
        found = estimate_of(config(prices=PRICES), trial_of(seed))
        taken = sum(one.prompt_tokens + one.reply_tokens for one in trial_of(1000 + seed, 50).used)
        inside += found.tokens.low <= taken <= found.tokens.high
        near += abs(found.tokens.mean - taken) <= 0.15 * taken
    assert inside >= 38
    assert near >= 38


def test_hours_and_money_are_those_of_steps_devices_and_calls():
    found = estimate_of(config(prices=PRICES), trial_of(0))
    assert found.hours.mean == pytest.approx((50 * 10 + 9) / 3600)
    calls = sum(one.prompt_tokens + 2 * one.reply_tokens for one in trial_of(0).used) * 25 / 1e6
    assert found.money.mean == pytest.approx(calls + 3.6 * found.hours.mean)
    assert found.money.low < found.money.mean < found.money.high
    assert estimate_of(config(), trial_of(0)).money is None
    assert estimate_of(config(), Trial()) is None


def test_evaluations_are_played_like_steps():
    held = config(evaluation={"every_steps": 10})
    assert evaluations(held) == 6
    alone, more = estimate_of(config(), trial_of(0)), estimate_of(held, trial_of(0, held_out=32))
    assert more.tokens.mean == pytest.approx(alone.tokens.mean * 56 / 50)
    assert more.hours.mean > alone.hours.mean


def test_what_was_begun_of_a_step_that_ran_out_of_time_is_not_taken_for_a_whole_one():
    whole, half = trial_of(0), trial_of(0)
    half.rows, half.stopped = half.rows[:1], True
    assert estimate_of(config(), half).tokens.mean == pytest.approx(estimate_of(config(), whole).tokens.mean)


def test_a_budget_below_a_step_is_fatal_and_one_below_the_job_a_note():
    def found(**budget):
        made = config(prices=PRICES, budget=budget, policies={"policy": {"sampling": {"max_tokens": 64}}})
        return [(one.key, one.fatal) for one in budget_findings(made, estimate_of(made, trial_of(0)))]

    assert found(tokens=1000) == [("budget.tokens", True)]
    assert found(tokens=20_000, hours=0.001) == [("budget.tokens", False), ("budget.hours", True)]
    assert found(money=0.3) == [("budget.money", False)]
    assert found(tokens=10**9, hours=9, money=99) == []


def test_the_bounds_by_few_episodes_are_those_of_students_t():
    """Two episodes of 100 and 140 tokens: the standard error is 20, and t with one degree of freedom is 12.706."""
    used = [Used(f"e{n}", "train", "policy", 1, 60, tokens) for n, tokens in enumerate((40, 80))]
    rows = [{"time/step_seconds": 10.0, "time/rollout_seconds": 6.0}] * 2
    found = estimate_of(config(), Trial(rows=rows, used=used, episodes=2, seconds=30.0)).tokens
    assert found.high / found.mean - 1 == pytest.approx(math.hypot(12.706 * 20 / 120, 0.1), rel=1e-4)
    assert found.low == 0.0
    alone = estimate_of(config(), Trial(rows=rows, used=used[:1], episodes=1, seconds=30.0)).tokens
    assert alone.high == 2 * alone.mean
