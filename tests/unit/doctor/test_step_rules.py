from __future__ import annotations

import json
from pathlib import Path

import pytest

from palestra.doctor.examination import health_of
from palestra.doctor.rule import RECENT, JobSize, RunHistory
from unit.learner.scripted_job import ScriptedJob, config

GROUPS = 8


def row(step: int, **changes: float) -> dict[str, float]:
    """A row of a step that learns."""
    return {
        "step": float(step),
        "train/episodes": 64.0,
        "train/episodes_without_tokens": 0.0,
        "train/episodes_discarded": 0.0,
        "train/groups_zero_variance": 2.0,
        "train/groups_dropped": 0.0,
        "train/reward_mean": 0.4,
        "train/trained_tokens": 500.0,
        "train/updates_skipped": 0.0,
        "train/grad_norm": 0.7,
        "train/entropy": 0.5,
        "rollout/truncated_share": 0.1,
    } | {name.replace("__", "/"): value for name, value in changes.items()}


def warnings(rows, groups: int = GROUPS, steps: int = 30):
    return health_of(RunHistory(JobSize(groups_per_step=groups, steps=steps), rows))


def codes(rows, steps: int = 30) -> list[str]:
    return [warning.code for warning in warnings(rows, steps=steps)]


def repeated(count: int, **changes: float) -> list[dict[str, float]]:
    return [row(step, **changes) for step in range(1, count + 1)]


EQUAL = {"train__groups_zero_variance": 8.0, "train__trained_tokens": 0.0}


def test_a_run_that_learns_has_none():
    assert codes([]) == []
    assert codes(repeated(5)) == []


def test_a_real_run_that_learned_has_none_at_any_step():
    """`palestra demo --steps 8` on two busy cores: held-out sums from 0.23 to 0.78."""
    rows = [json.loads(line) for line in (Path(__file__).parent / "good_run.jsonl").read_text().splitlines()]
    assert rows[-1]["validation/reward_mean"] > 3 * rows[0]["validation/reward_mean"]
    trained = [row for row in rows if "train/episodes" in row]
    for end in range(1, len(trained) + 1):
        assert warnings(trained[:end], groups=16, steps=8) == []


def test_episodes_without_calls_are_said_after_one_step():
    (warning,) = warnings([row(4, train__episodes_without_tokens=64.0, **EQUAL)])
    assert (warning.code, warning.step) == ("no_calls", 4)
    assert "64 of 64 episodes of step 4" in warning.text
    assert codes([row(1, train__episodes_without_tokens=32.0)]) == ["no_calls"]
    assert codes([row(1, train__episodes_without_tokens=31.0)]) == []


def test_equal_rewards_are_said_when_a_few_steps_had_nothing_else():
    assert codes(repeated(RECENT - 1, **EQUAL)) == []
    assert codes(repeated(RECENT, **EQUAL)) == ["equal_rewards"]
    assert codes([*repeated(RECENT - 1, **EQUAL), row(RECENT)]) == []
    assert codes(repeated(1, **EQUAL), steps=1) == ["equal_rewards"]  # there will be no more steps to wait for


def test_an_entropy_that_falls_to_a_tenth_in_one_step_is_a_collapse():
    assert codes([row(1, train__entropy=5.5), row(2, train__entropy=0.0)]) == ["entropy_collapse"]
    assert codes([row(1, train__entropy=5.5), row(2, train__entropy=0.6)]) == []
    assert codes([row(1, train__entropy=0.05), row(2, train__entropy=0.001)]) == []  # it was sure already
    collapsed = [row(1, train__entropy=5.5), row(2, train__entropy=0.0)]
    assert codes([*collapsed, row(3, train__entropy=0.0)]) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"train__updates_skipped": 1.0, "train__trained_tokens": 9.0}, "updates_skipped"),
        ({"train__trained_tokens": 0.0}, "no_gradient"),
        ({"train__grad_norm": 0.0}, "no_gradient"),
        ({"train__groups_dropped": 8.0}, "groups_dropped"),
        ({"train__episodes_discarded": 64.0}, "episodes_discarded"),
    ],
)
def test_what_one_step_shows(changes, code):
    assert codes([row(1), row(2, **changes)]) == [code]
    assert codes([row(1, **changes), row(2)]) == []


def test_a_gradient_of_0_is_said_with_whether_the_rewards_differ():
    """`reinforce_pp` compares with the batch, so that it counts no group without variance where all is equal."""
    none = {"train__groups_zero_variance": 0.0, "train__grad_norm": 0.0}
    for deviation, said in (
        (0.0, "all rewards of step 1 are equal"),
        (1e-17, "are equal"),
        (0.2, "rewards of step 1 differ"),
    ):
        (warning,) = warnings([row(1, train__reward_std=deviation, **none)])
        assert warning.code == "no_gradient"
        assert said in warning.text


def test_a_last_gradient_of_0_is_no_sign_where_updates_before_have_moved_the_policy():
    """As of `gspo` with two epochs: all tokens are clipped in the second one, because the first has moved it."""
    last = {"train__grad_norm": 0.0, "train__clip_fraction": 1.0}
    assert codes([row(1, **last, train__clip_fraction_on_policy=0.0)]) == []
    assert codes([row(1, **last, train__clip_fraction_on_policy=1.0)]) == ["no_gradient"]
    assert codes([row(1, **last)]) == ["no_gradient"]
    nothing = last | {"train__trained_tokens": 0.0}
    assert codes([row(1, **nothing, train__clip_fraction_on_policy=0.0)]) == ["no_gradient"]


def test_replies_that_are_all_cut():
    assert codes(repeated(RECENT, rollout__truncated_share=1.0)) == ["truncated"]
    assert codes(repeated(RECENT - 1, rollout__truncated_share=1.0)) == []


def test_contexts_that_are_often_full_are_a_sign():
    assert codes(repeated(RECENT, rollout__context_full_share=0.1)) == ["context_full"]
    assert codes(repeated(RECENT, rollout__context_full_share=0.09)) == []
    assert codes(repeated(RECENT)) == []  # as in rows of runs that did not count it


async def test_a_warning_is_an_event_when_it_appears_and_stands_in_the_progress_while_it_holds(tmp_path):
    job = ScriptedJob(tmp_path, config(steps=5), equal_rewards=True)
    await job.run()
    told = [data for kind, data in job.events if kind == "warning"]
    assert [(data["code"], data["step"]) for data in told] == [("equal_rewards", 3)]
    assert [(warning.code, warning.step) for warning in job.progress.warnings] == [("equal_rewards", 5)]
    assert [row["train/warnings"] for row in rows_of(tmp_path)] == [0, 0, 1, 1, 1]


def rows_of(folder) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/warnings" in row]
