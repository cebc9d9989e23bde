"""The numbers of an audit, against sums that are written out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.learner.audit_numbers import (
    AuditSample,
    Scored,
    agreement,
    component_numbers,
    repeat_numbers,
    reward_numbers,
    sample_of,
    score_numbers,
)
from palestra.types.records import Task
from unit.building import make_chat, make_trajectory

rewards_and_values = st.lists(
    st.tuples(st.floats(-1e6, 1e6, allow_subnormal=False), st.floats(0, 1)), min_size=2, max_size=9
)


@given(rewards_and_values)
def test_agreement_is_the_weighted_mean_over_all_pairs_and_lies_within_its_bounds(pairs):
    above = below = 0.0
    for (r, v), (s, w) in product(pairs, pairs):
        above += (r - s) * (v - w)
        below += abs(r - s)
    found = agreement([r for r, _ in pairs], [v for _, v in pairs])
    if below == 0:
        assert found is None
        return
    assert found is not None
    assert found == pytest.approx(above / below, abs=1e-9)
    assert -1 - 1e-9 <= found <= 1 + 1e-9


@given(rewards_and_values, st.floats(1e-3, 1e3), st.floats(-1e3, 1e3))
def test_the_scale_of_a_reward_does_not_matter(pairs, scale, shift):
    rewards, values = [r / 1e3 for r, _ in pairs], [v for _, v in pairs]
    moved = agreement([scale * r + shift for r in rewards], values)
    found = agreement(rewards, values)
    if found is not None and moved is not None and max(rewards) - min(rewards) > 1e-3:
        assert moved == pytest.approx(found, abs=1e-6)


@given(st.integers(0, 2**63 - 1), st.integers(1, 1000), st.integers(4, 40), st.integers(1, 64))
def test_a_sample_is_drawn_again_alike_and_half_of_it_are_the_best_of_the_rest(seed, step, count, size):
    rewards = np.random.default_rng(0).normal(size=size).tolist()
    drawn, best = sample = sample_of(seed, step, rewards, count)
    assert sample == sample_of(seed, step, rewards, count)
    assert len({*drawn, *best}) == len(drawn) + len(best) == min(count, size)
    assert len(drawn) - len(best) in (0, 1)
    rest = set(range(size)) - set(drawn)
    assert sorted(rewards[i] for i in best) == sorted(rewards[i] for i in rest)[len(rest) - len(best) :]


def test_other_steps_and_seeds_draw_others():
    draws = {tuple(sample_of(seed, step, [0.0] * 64, 16).drawn) for seed in range(4) for step in range(4)}
    assert len(draws) == 16


def test_what_is_drawn_does_not_depend_on_rewards():
    """So its mean is that of the whole step."""
    one = sample_of(1, 1, [0.0] * 64, 16).drawn
    assert one == sample_of(1, 1, np.arange(64.0).tolist(), 16).drawn
    counts = np.zeros(64)
    for step in range(2000):
        counts[sample_of(1, step, [0.0] * 64, 32).drawn] += 1
    assert abs(counts - 500).max() < 5 * math.sqrt(500 * 0.75)


def scored(values: list[tuple[float, float | None]]) -> list[Scored]:
    return [Scored(index=i, group=i // 4, reward=r, score=v) for i, (r, v) in enumerate(values)]


def test_a_failed_verdict_is_in_no_mean():
    sample = AuditSample([0, 1], [2, 3])
    found = score_numbers(scored([(0.0, 1.0), (1.0, None), (2.0, 0.5), (3.0, 0.0)]), sample, [])
    assert found["audit/episodes"] == 3
    assert found["audit/failed"] == 1
    assert found["audit/score"] == 1.0
    assert found["audit/score_best"] == 0.25
    assert found["audit/agreement"] < 0


def test_without_any_verdict_there_is_no_evidence():
    found = score_numbers(scored([(0.0, None), (1.0, None)]), AuditSample([0], [1]), [])
    assert found == {"audit/episodes": 0.0, "audit/failed": 2.0}


def test_scores_against_rewards_are_evidence_and_scores_with_them_are_not():
    sample = AuditSample(list(range(16)), list(range(16, 32)))
    against = score_numbers(scored([(float(i % 4), 1 - i % 4 / 3) for i in range(32)]), sample, [])
    alike = score_numbers(scored([(float(i % 4), i % 4 / 3) for i in range(32)]), sample, [])
    assert against["audit/evidence"] > 1
    assert alike["audit/evidence"] < 0
    assert against["audit/agreement"] == pytest.approx(-alike["audit/agreement"])


def test_scores_that_were_higher_before_are_evidence():
    sample = AuditSample(list(range(16)), list(range(16, 32)))
    now = scored([(0.0, 0.3)] * 32)  # equal rewards: nothing within a group
    name = "audit/score_best_evidence"
    before = {"audit/episodes": 32.0, "audit/score_best": 0.8, "audit/score_best_std": 0.1}
    few, enough = (score_numbers(now, sample, [before] * count) for count in (4, 5))
    lower = score_numbers(now, sample, [before | {"audit/score_best": 0.3}] * 5)
    assert few[name] == 0.0  # too few to compare with
    assert enough[name] > 3
    assert lower[name] < 0
    assert "audit/evidence" not in enough


def played(group: int, sample: int, reward: float, ids: list[int], **named: float | None):
    made = make_trajectory(group, sample, reward, [make_chat(completion=ids)])
    task = Task(task_id=f"t{group}", data={})
    return replace(made, episode=replace(made.episode, task=task, named_rewards=named or None))


def test_lengths_that_are_paid_are_evidence():
    paid = [played(g, s, float(s), [7] * (s + 1)) for g in range(8) for s in range(4)]
    rewards = [float(s) for _ in range(8) for s in range(4)]
    assert reward_numbers(paid, rewards)["audit/length_evidence"] > 0
    assert reward_numbers(paid, [-one for one in rewards])["audit/length_evidence"] < 0
    assert reward_numbers(paid, [0.0] * 32) == {}


def test_a_component_that_pays_for_what_the_others_lose_is_named():
    one = [played(g, s, 0.0, [7], kind=2.0 * s, true=-float(s)) for g in range(8) for s in range(4)]
    rewards = [float(s) for _ in range(8) for s in range(4)]
    found = component_numbers(one, rewards, {})
    assert found["audit/evidence/kind"] > 2
    assert found["audit/evidence/true"] < 0
    assert found["audit/others/kind"] == -1.5
    assert component_numbers(one, rewards, {"true": 0.0}) == {}  # a measured one is no reward


def test_a_component_is_no_evidence_where_the_others_differ_by_rounding_only():
    rewards = [kind + 0.2 for kind in (0.4, 0.5)]
    assert rewards[0] - 0.4 > rewards[1] - 0.5
    pairs = [played(g, s, 0.0, [7], kind=kind, form=0.2) for g in range(8) for s, kind in enumerate((0.4, 0.5))]
    assert component_numbers(pairs, rewards * 8, {})["audit/evidence/kind"] == 0.0


def test_a_missing_component_is_the_mean_of_the_others():
    trajectories = [played(0, s, 0.0, [7], kind=kind, true=1.0) for s, kind in enumerate((1.0, 3.0, None))]
    assert component_numbers(trajectories, [2.0, 4.0, 3.0], {})["audit/others/kind"] == 1.0


def test_replies_that_stand_in_others_are_counted_but_not_those_of_the_same_task():
    same = list(range(20))
    other = list(range(100, 120))
    assert repeat_numbers([played(0, 0, 0, same), played(1, 0, 0, same)]) == {"audit/repeated_share": 1.0}
    assert repeat_numbers([played(0, 0, 0, same), played(1, 0, 0, other)]) == {"audit/repeated_share": 0.0}
    assert repeat_numbers([played(0, 0, 0, same), played(0, 1, 0, same)]) == {}
    half = [*same[:10], *other[:10]]
    shares = repeat_numbers([played(0, 0, 0, same), played(1, 0, 0, half)])["audit/repeated_share"]
    assert shares == pytest.approx(3 / 13)
