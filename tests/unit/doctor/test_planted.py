"""Each fault that is planted in a healthy run is named, from the step on that shows it; healthy runs show nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from palestra.config import JobConfig
from palestra.doctor.examination import RULES, findings_of
from palestra.doctor.rule import JobSize
from palestra_inspect.audit_rules import AUDIT_RULES
from palestra_inspect.opponent_rules import OPPONENT_RULES
from unit.doctor.curves import JOB, found, run_of


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_show_nothing(seed):
    assert found(run_of(100, seed=seed)) == {}


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "ppo", "grpo-8x8"])
def test_runs_that_were_trained_and_learned_show_nothing(name):
    """FrozenLake with a model of half a million parameters: from 0.08 of the lakes to 0.7 to 0.9 of them."""
    rows, job = recorded("healthy_runs.json", name)
    assert rows[-1]["train/reward_mean"] > 3 * rows[0]["train/reward_mean"]
    assert findings_of(rows, job) == []


def recorded(file: str, name: str) -> tuple[list[dict[str, float]], JobSize]:
    """The rows of a run that was trained, and its job."""
    run = json.loads((Path(__file__).parent / file).read_text())[name]
    rows = [
        {metric: value for metric, value in zip(run["columns"], values, strict=True) if value is not None}
        for values in zip(*run["columns"].values(), strict=True)
    ]
    return rows, JobSize(groups_per_step=run["groups_per_step"], steps=len(rows))


ROOT = Path(__file__).parents[3]
LEARNED = {
    f"{path.stem}-{seed}": run["outcome"]["rows"]
    for path in sorted((ROOT / "bench" / "learned").glob("*.json"))
    for seed, run in json.loads(path.read_text()).items()
}


@pytest.mark.parametrize("name", LEARNED)
def test_the_rewards_and_validations_of_recipes_that_learned_show_nothing(name):
    """Addition, MiniWoB and the terminal, three seeds of each; what was not kept of them is as in a healthy run."""
    trained = {int(row["step"]): row for row in run_of(40)}
    rows = [trained.get(int(row["step"]), {}) | row | {"validation/scored": 48.0} for row in LEARNED[name]]
    assert findings_of(rows, JobSize(groups_per_step=16, steps=len(rows) - 1)) == []


COMPARED = json.loads((ROOT / "docs" / "comparison.json").read_text())["runs"]
FELL = {("frozen-lake-4x4/a2c", "2"), ("frozen-lake-8x8/a2c", "3"), ("frozen-lake-8x8/dapo", "1")}


def test_validations_of_compared_runs_show_nothing_but_in_the_three_that_fell():
    """All validation curves of docs/comparison.md, about 180 of twelve algorithms. Three lost what they had learned."""
    fell = set()
    for name, compared in COMPARED.items():
        for seed, run in compared["seeds"].items():
            curve = [row for row in run["rows"] if "validation/reward_mean" in row]
            steps = run_of(len(curve) - 1, lambda step: {"train__reward_std": 0.5})
            rows = [
                row | {"step": float(step), "validation/scored": row["validation/total"]}
                for step, row in enumerate(curve)
            ]
            rows = [rows[0]] + [made | row for made, row in zip(steps, rows[1:], strict=True)]
            codes = {one.code for one in findings_of(rows, JobSize(groups_per_step=16, steps=len(curve) - 1))}
            assert codes <= {"validation_falls"}, (name, seed)
            fell |= {(name, seed)} if codes else set()
    assert fell == FELL


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
    "one_reply": (lambda step: {"rollout__same_replies_share": 0.1 if step < 40 else 1.0}, 42),
    "tools_unused": (
        lambda step: {"rollout__calls_with_tools": 200.0, "rollout__calls_of_tools": 60.0 if step < 40 else 0.0},
        42,
    ),
    "tokens_clipped": (after(40, train__clip_fraction=0.5), 42),
    "off_policy_gap": (after(40, train__logprob_gap_mean=0.8, rollout__staleness_max=2.0), 42),
    "tokens_stale": (after(40, rollout__staleness_mean=5.0, rollout__staleness_max=6.0), 42),
    "validation_falls": (
        lambda step: (
            {} if step % 5 else {"validation__reward_mean": 0.8 if step <= 40 else 0.4, "validation__scored": 64.0}
        ),
        50,
    ),
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
    elsewhere = {rule.code for rule in (*OPPONENT_RULES, *AUDIT_RULES)}  # in test_opponents.py and test_audit_rules.py
    assert {rule.code for rule in RULES} == set(PLANTED) | elsewhere


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


def cut(*shares: float, **more: tuple[float, ...]):
    """Replies that are cut in a run whose reward does not rise, and what else each step has."""
    of_step = {name.replace("__", "/"): values for name, values in more.items()}

    def change(step: int) -> dict[str, float]:
        own = {"rollout/truncated_share": shares[step - 1], "train/reward_mean": 0.2, "train/reward_std": 0.4}
        return own | {name: values[step - 1] for name, values in of_step.items()}

    return run_of(len(shares), change)


VALIDATED = {"step": 0.0, "validation/reward_mean": 0.17, "validation/scored": 40.0}
RISES = tuple(0.03 + 0.09 * step for step in range(10))
# Of a run of recipes/addition.py that learned, as measured.
LEARNED_REWARDS = [
    0.01,
    0.05,
    0.17,
    0.47,
    0.72,
    0.69,
    0.77,
    0.78,
    0.84,
    0.95,
    0.81,
    0.74,
    0.65,
    0.89,
    0.84,
    0.73,
    0.85,
    0.89,
    0.82,
    0.82,
    0.88,
    0.82,
    0.93,
    0.89,
    0.94,
    0.91,
    0.79,
    0.67,
    0.81,
    0.7,
    0.9,
    0.92,
    0.92,
    0.8,
    0.81,
    0.82,
]
LEARNED_ENTROPIES = [
    2.123,
    1.968,
    0.767,
    0.447,
    0.356,
    0.145,
    0.135,
    0.076,
    0.156,
    0.025,
    0.12,
    0.066,
    0.06,
    0.076,
    0.031,
    0.025,
    0.023,
    0.05,
    0.04,
    0.037,
    0.071,
    0.053,
    0.029,
    0.033,
    0.009,
    0.053,
    0.056,
    0.145,
    0.066,
    0.121,
    0.089,
    0.015,
    0.071,
    0.041,
    0.053,
    0.065,
]
SICK = {
    "half of the replies cut": (cut(0.28, 0.44, 0.84, 0.88), {"truncated"}),
    "half cut, and the reward pays for it": (
        [
            VALIDATED,
            *cut(0.3, 0.44, 0.84, 0.88, 0.7, train__reward_mean=RISES[:5], validation__reward_mean=(0.07,) * 5),
        ],
        {"truncated"},
    ),
    "cut late, and half of what was gained is lost": (
        run_of(60, after(40, rollout__truncated_share=0.7, train__reward_mean=0.4)),
        {"truncated", "reward_collapse"},
    ),
    "cut late, and most of what was gained is kept": (
        run_of(60, after(40, rollout__truncated_share=0.7, train__reward_mean=0.7)),
        set(),
    ),
    "all cut from the start": (cut(1.0, 1.0, 1.0), {"truncated"}),
    "cut, and learns": (cut(*[0.9] * 10, train__reward_mean=RISES), set()),
    "all cut, and learns": (cut(*[1.0] * 10, train__reward_mean=RISES, validation__reward_mean=RISES), set()),
    "few cut": (cut(*[0.4] * 10), set()),
    "entropy falls to nothing, and the reward is high": (
        run_of(60, lambda step: {"train__entropy": 0.41 * 0.93**step}),
        {"entropy_lost"},
    ),
    "entropy falls as far as in runs that learned": (
        run_of(60, lambda step: {"train__entropy": max(0.6 * 0.93**step, 0.03)}),
        set(),
    ),
    "learns within the first ten steps, and is sure of some steps' answers": (
        run_of(
            36,
            lambda step: {
                "train__entropy": LEARNED_ENTROPIES[step - 1],
                "train__reward_mean": LEARNED_REWARDS[step - 1],
            },
        ),
        set(),
    ),
    "one task has one right reply": (run_of(60, lambda step: {"rollout__same_replies_share": 0.97}), set()),
    "two versions old": (
        run_of(60, after(1, rollout__staleness_mean=1.8, rollout__staleness_max=2.0, train__logprob_gap_mean=0.08)),
        set(),
    ),
}


@pytest.mark.parametrize("name", SICK)
def test_sick_runs_and_runs_that_look_alike_by_all_rules(name):
    rows, codes = SICK[name]
    assert {one.code for one in findings_of(rows, JOB)} == codes


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("stale", {"tokens_clipped", "off_policy_gap", "tokens_stale"}),  # 4 epochs, 6 versions old, a rate of 0.02
        ("one-reply", {"one_reply", "equal_rewards"}),  # a rate of 0.3, and a reward of 1
    ],
)
def test_runs_that_were_made_sick_are_named(name, codes):
    rows, job = recorded("sick_runs.json", name)
    named = {one.code for one in findings_of(rows, job)}
    assert codes <= named


def test_healthy_updates_of_narrow_bounds_clip_most_tokens():
    config = JobConfig.model_validate({"algorithm": {"name": "gspo"}, "rollout": {"groups_per_step": 16}})
    assert findings_of(run_of(60, after(1, train__clip_fraction=0.6)), JobSize.of(config)) == []


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
