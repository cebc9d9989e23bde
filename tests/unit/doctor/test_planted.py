"""Each fault that is planted in a healthy run is named, from the step on that shows it; healthy runs show nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from palestra.doctor.examination import findings_of
from palestra.doctor.opponent_rules import OPPONENT_RULES
from palestra.doctor.rule import JobSize
from palestra.doctor.rules import RULES
from unit.doctor.curves import JOB, found, run_of


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_show_nothing(seed):
    assert found(run_of(100, seed=seed)) == {}


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "ppo", "grpo-8x8"])
def test_runs_that_were_trained_and_learned_show_nothing(name):
    """FrozenLake with a model of half a million parameters: from 0.08 of the lakes to 0.7 to 0.9 of them."""
    run = json.loads((Path(__file__).parent / "healthy_runs.json").read_text())[name]
    rows = [
        {metric: value for metric, value in zip(run["columns"], values, strict=True) if value is not None}
        for values in zip(*run["columns"].values(), strict=True)
    ]
    assert rows[-1]["train/reward_mean"] > 3 * rows[0]["train/reward_mean"]
    assert findings_of(rows, JobSize(groups_per_step=run["groups_per_step"], steps=len(rows))) == []


def test_a_run_that_has_learned_and_stays_there_shows_nothing():
    assert (
        found(run_of(100, lambda step: {"train__reward_mean": 0.9 + 0.02 * math.sin(step)} if step > 50 else {})) == {}
    )


def after(step: int, **changes: float):
    return lambda now: changes if now >= step else {}


def idle(step: int) -> dict[str, float]:
    """Nothing moves but noise, which goes up and down."""
    up = 1 if step % 2 else -1
    return {
        "train__reward_mean": 0.3 + 0.02 * up,
        "train__entropy": 1.0 + 0.03 * up,
        "rollout__completion_tokens": 128 * (40 + up),
    }


def opponents(step: int, both: bool = True) -> dict[str, float]:
    rise = 0.06 * step
    return {
        "store__episodes_of_two": 128.0,
        "store__constant_sum_share": 1.0 if step <= 3 else 0.2,
        "store__reward_spread": 2.0,
        "store__reward_correlation": -1.0 if step <= 3 else 0.2,
        "store__reward/black": 0.1 + rise,
        "store__reward/white": -0.1 + (rise if both else -rise),
    }


PLANTED = {
    "no_calls": (after(40, train__episodes_without_tokens=80.0), 40),
    "equal_rewards": (after(40, train__groups_zero_variance=16.0), 42),
    "no_gradient": (after(40, train__grad_norm=0.0), 40),
    "updates_skipped": (after(40, train__updates_skipped=1.0), 40),
    "entropy_collapse": (lambda step: {"train__entropy": 0.01} if step == 5 else {}, 5),
    "truncated": (after(40, rollout__truncated_share=1.0), 42),
    "context_full": (after(40, rollout__context_full_share=0.2), 42),
    "forfeits": (after(40, rollout__forfeit_share=0.2), 42),
    "groups_dropped": (after(40, train__groups_dropped=16.0), 40),
    "episodes_discarded": (after(40, train__episodes_discarded=128.0), 40),
    "logprob_drift": (after(40, train__logprob_gap_mean=0.2), 40),
    "ratio_out_of_range": (after(40, train__ratio_mean=1.6), 42),
    "forks_lose_tokens": (after(40, rollout__drift_share=0.4, rollout__forks_edited_message=50.0), 42),
    "reward_collapse": (after(40, train__reward_mean=0.05, train__reward_std=0.1), 41),
    "reward_oscillates": (lambda step: {"train__reward_mean": (0.1, 0.9)[step // 3 % 2]} if step > 40 else {}, 0),
    "entropy_lost": (lambda step: {"train__entropy": 0.8 * 0.85**step, "train__reward_mean": 0.1}, 22),
    "lengths_run_away": (
        lambda step: {"rollout__completion_tokens": 128.0 * (30 + 4 * step), "train__reward_mean": 0.1},
        13,
    ),
    "learning_rate_idle": (idle, 30),
    "workers_fail": (
        after(40, **{"store__claims": 200.0, "store__failures": 72.0, "store__reason/timed_out": 72.0}),
        41,
    ),
    "replays_late": (
        after(
            40,
            store__late_failures=20.0,
            store__late_failure_calls=60.0,
            store__completed=128.0,
            store__completed_calls=384.0,
        ),
        40,
    ),
    "opponents_rise": (opponents, 7),
    "disk_fills": (after(40, disk__free_bytes=1e9), 40),
}


def test_every_rule_has_a_planted_case():
    of_games = {rule.code for rule in OPPONENT_RULES}  # test_opponents.py has them
    assert {rule.code for rule in RULES} == set(PLANTED) | of_games


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_fault_is_named_alone_and_since_its_step(code):
    change, since = PLANTED[code]
    named = found(run_of(60, change))
    assert code in named, named
    if since:
        assert named[code][0] == since
    # Noise and plateaus that come with a planted curve may show another sign of the same fault, and no other one.
    related = {"reward_oscillates": {"reward_collapse"}, "entropy_lost": {"entropy_collapse"}}.get(code, set())
    assert set(named) - {code} <= related


def test_what_is_seen_is_said_with_its_numbers():
    (finding,) = findings_of(run_of(60, PLANTED["forks_lose_tokens"][0]), JOB)
    assert "40%" in finding.seen
    assert "edited message" in finding.seen
    assert (finding.since, finding.until, finding.holds, finding.steps) == (42, 60, True, 19)
    (finding,) = findings_of(run_of(60, PLANTED["workers_fail"][0]), JOB)
    assert "216 of 600 attempts" in finding.seen
    assert "timed_out" in finding.seen


def test_a_sign_that_came_twice_is_one_finding_of_the_last_time():
    def twice(step: int) -> dict[str, float]:
        return {"train__updates_skipped": 1.0} if step in (10, 11, 30) else {}

    (finding,) = findings_of(run_of(60, twice), JOB)
    assert (finding.since, finding.until, finding.holds, finding.steps) == (30, 30, False, 3)


def test_a_lucky_player_is_no_sign_while_the_other_loses():
    assert found(run_of(60, lambda step: opponents(step, both=False))) == {}


def test_longer_episodes_with_a_higher_reward_are_no_sign():
    assert found(run_of(60, lambda step: {"rollout__completion_tokens": 128.0 * (30 + 4 * step)})) == {}


def test_rewards_of_few_groups_may_be_noisy():
    """Of two groups a step, means between 0.1 and 0.9 are chance."""
    rows = run_of(
        60, lambda step: {"train__reward_mean": (0.2, 0.8, 0.5)[step % 3], "train__groups_zero_variance": 0.0}
    )
    assert findings_of(rows, JobSize(groups_per_step=2, steps=100)) == []
