"""The baseline of a session, against a mean that is computed the long way, and the advantages that follow from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from palestra.algorithms.base import Group
from palestra.algorithms.registry import create_algorithm
from palestra.config import parse_config
from palestra_live.learning import WINDOW, SessionScores, baseline_of
from unit.building import make_chat, make_sample, make_trajectory

SCORED = st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.floats(0, 1)), max_size=200).map(
    lambda rows: [(f"s{place}", cluster, score) for place, (cluster, score) in enumerate(rows)]
)


@given(SCORED, st.integers(0, 199), st.sampled_from([None, "a", "b"]))
def test_it_is_the_mean_of_the_newest_others_of_the_cluster_or_of_all(scored, place, cluster):
    name = f"s{place}"
    found = baseline_of(name, cluster, scored)
    others = [(of, score) for one, of, score in scored if one != name]
    alike = [score for of, score in others if of == cluster]
    if len(alike) >= WINDOW:
        assert found == np.float64(sum(alike[:WINDOW])) / WINDOW
    elif len(others) >= WINDOW:
        assert found == np.float64(sum(score for _, score in others[:WINDOW])) / WINDOW
    else:
        assert found is None


def test_a_session_is_not_its_own_baseline():
    scored = [("mine", None, 1.0)] + [(f"s{place}", None, 0.25) for place in range(WINDOW)]
    assert baseline_of("mine", None, scored) == 0.25
    assert baseline_of("mine", None, scored[:WINDOW]) is None, "of 63 others none is made"


def test_an_old_session_is_compared_with_the_newest():
    scored = [(f"s{place}", None, 0.5) for place in range(WINDOW)] + [("mine", None, 0.0), ("older", None, 1.0)]
    assert baseline_of("mine", None, scored) == 0.5


def row(name, cluster, score):
    return {"session_id": name, "cluster": cluster, "score": score}


@given(SCORED, st.integers(0, 199), st.sampled_from([None, "a", "b"]))
def test_what_is_kept_gives_the_baseline_of_all(scored, place, cluster):
    kept = SessionScores()
    for one in scored:
        kept.add(row(*one))
    assert kept.baseline(f"s{place}", cluster) == baseline_of(f"s{place}", cluster, scored[::-1])
    assert len(kept._newest) <= WINDOW + 1
    assert all(len(scores) <= WINDOW + 1 for scores in kept._of.values())


def test_a_forgotten_session_neither_waits_nor_counts():
    kept = SessionScores()
    for place in range(WINDOW + 1):
        kept.add(row(f"s{place}", "a", 1.0 if place == 5 else 0.0), used=place > 8)
    assert kept.baseline("new", "a") == 1.0 / WINDOW
    kept.remove({"s5"})
    assert kept.baseline("new", "a") == 0.0
    assert list(kept.waiting) == ["s0", "s1", "s2", "s3", "s4", "s6", "s7", "s8"]


def test_each_token_of_a_session_has_its_score_minus_its_baseline():
    algorithm = create_algorithm(parse_config({"algorithm": {"name": "live"}, "rollout": {"group_size": 1}}).algorithm)
    groups = []
    for place, (score, baseline) in enumerate([(1.0, 0.25), (0.0, 0.5), (0.5, 0.5)]):
        name = f"train-{place:06d}-00"
        one = make_trajectory(place, 0, score, [make_chat(name)])
        task = replace(one.episode.task, data={"baseline": baseline})
        one = replace(one, episode=replace(one.episode, task=task))
        groups.append(Group(trajectories=(one,), rows=(make_sample([1, 2, 3, 4, 5], [3, 4], name=name),)))
    found = algorithm.advantages(groups, {}).advantages
    assert [column[3:].tolist() for column in found] == [[0.75, 0.75], [-0.5, -0.5], [0.0, 0.0]]
    assert all(algorithm.learns_from(group.trajectories) for group in groups)
