"""What the events of a job are in words."""

from __future__ import annotations

import pytest

from palestra_service.commands.submit import describe, trained_of_several

STEP = {"step": 3.0, "train/reward_mean": 0.5, "time/step_seconds": 2.0}


def test_the_policy_of_a_step_is_named_where_there_are_several():
    assert describe("step", STEP, "") == "step    3   reward   0.50      2.0 s"
    assert describe("step", STEP, "white") == "step    3   white reward   0.50      2.0 s"
    assert trained_of_several({"policies": {"a": {}}}) == trained_of_several({}) == ""
    assert trained_of_several({"policies": {"b": {"frozen": True}, "a": {}}}) == "a"
    assert describe("step", {"step": 0, "validation/reward_mean": 0.25}, "a") == "step    0   validation  0.25"


def test_of_several_policies_each_has_its_reward_and_its_checkpoint():
    config = {"policies": {"white": {}, "black": {}, "old": {"frozen": True}}}
    assert trained_of_several(config) == ""
    row = {"step": 3.0, "white/train/reward_mean": 0.5, "black/train/reward_mean": -0.5, "time/step_seconds": 2.0}
    assert describe("step", row, "") == "step    3   white reward   0.50   black reward  -0.50      2.0 s"
    row |= {"white/validation/reward_mean": 1.0}
    assert "white validation  1.00" in describe("step", row, "")
    assert describe("saved", {"step": 3, "policy": "black"}, "") == "black saved after step 3"
    assert describe("saved", {"step": 3, "policy": "white"}, "white") == "saved after step 3"


@pytest.mark.parametrize("kind", ["engine_worker_lost", "trainer_lost", "base_lost"])
def test_what_a_job_has_lost_is_a_line(kind):
    text = "inference worker 1 was killed by SIGKILL; another one is started"
    assert describe(kind, {"step": 3, "text": text}, "a") == text
