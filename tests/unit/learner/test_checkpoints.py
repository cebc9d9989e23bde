"""Which weights are kept: the newest ones, and those that validated best."""

from __future__ import annotations

import pytest

from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.learner.schedule import CheckpointSchedule
from palestra.trainer.checkpoint import best_weights
from palestra.trainer.fake import FakeTrainer

REWARD = "validation/reward_mean"


async def no_event(kind: str, data: dict) -> None: ...


async def schedule(tmp_path, *names: str, **settings) -> CheckpointSchedule:
    config = JobConfig.model_validate(settings)
    trainer = FakeTrainer(keep=2)
    for name in names:
        await trainer.create(name, config.policies.get(name, config.policies["policy"]))
    folders = {name: tmp_path / name for name in names}
    return CheckpointSchedule(config, trainer, folders, {name: {} for name in names}, lambda: 0.0, no_event)


async def test_the_weights_that_validated_best_are_kept_of_equal_ones_the_last(tmp_path):
    kept = await schedule(tmp_path, "policy")
    found = []
    rows = [(0, 0.9), (5, 0.2), (10, 0.5), (15, 0.4), (20, 0.5), (25, None), (30, 0.1)]
    for step, reward in rows:
        await kept.keep_best(step, {} if reward is None else {REWARD: reward})
        found.append((best_weights(tmp_path / "policy") or (None, None))[1])
    assert found == [None, 5, 10, 10, 20, 20, 20]
    again = await schedule(tmp_path, "policy")
    again.know_best([{"step": float(step), REWARD: reward or 0.0} for step, reward in rows])
    await again.keep_best(35, {REWARD: 0.45})
    assert best_weights(tmp_path / "policy")[1] == 20
    await again.keep_best(40, {REWARD: 0.6})
    assert best_weights(tmp_path / "policy")[1] == 40


async def test_of_policies_that_play_against_each_other_no_best_is_kept(tmp_path):
    kept = await schedule(tmp_path, "policy", "other")
    await kept.keep_best(5, {REWARD: 0.5, "policy/validation/reward_mean": 1.0})
    assert best_weights(tmp_path / "policy") is None


def test_a_deterministic_job_keeps_its_optimizer():
    with pytest.raises((ConfigError, ValueError), match=r"checkpoint\.optimizer"):
        JobConfig.model_validate({"deterministic": True, "checkpoint": {"optimizer": False}})
