"""Names of metrics where one policy is trained, and where several are."""

from __future__ import annotations

import pytest

from palestra.types.metrics import OF_THE_JOB, by_policy, names_of_policies, of_policies, row_of_policy
from unit.building import metric_names

RIVALS = ("white", "train")  # also with a name that is the beginning of all names


def test_what_is_of_the_job_is_known():
    assert metric_names() >= OF_THE_JOB


@pytest.mark.parametrize("policy", RIVALS)
def test_a_row_of_several_gives_each_its_own_back(policy):
    plain = {name: float(number) for number, name in enumerate(sorted(metric_names()))}
    row = {name: value for rival in RIVALS for name, value in by_policy(plain, rival).items()}
    assert plain.items() <= row_of_policy(row, policy, RIVALS).items()
    assert row_of_policy(plain, "white", ()) == plain


def test_a_metric_is_found_of_each_policy_that_has_it():
    row = {"step": 1.0, "white/train/reward_mean": 0.5, "train/train/reward_mean": 0.25, "white/train/entropy": 1.0}
    assert of_policies(row, "train/reward_mean") == {"white": 0.5, "train": 0.25}
    assert of_policies({"train/reward_mean": 2.0}, "train/reward_mean") == {"": 2.0}
    assert of_policies({"step": 0.0}, "train/reward_mean") == {}
    rows = [{"black/train/entropy": 1.0}, row]
    assert names_of_policies(rows, "train/entropy") == ["black/train/entropy", "white/train/entropy"]
