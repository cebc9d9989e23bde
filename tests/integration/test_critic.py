"""Jobs with a critic and a reference: learned from groups of one, repeated and resumed bit by bit."""

from __future__ import annotations

import json

import pytest

import palestra
from palestra import JobConfig, RolloutSpec
from palestra.envs import Environment
from palestra.errors import ConfigError
from palestra.store.browsing import browse, list_episodes, read_episode

TASKS = [{"text": f"task {number}"} for number in range(4)]


class Lengths(Environment):
    """The reward is the length of the reply; after two turns the episode is cut off."""

    blocking = False
    system = "Count."
    max_steps = 2

    def reset(self, task):
        return task["text"], {}

    def step(self, action):
        return "again", float(len(action)) / 10, False, False, {}


def job(folder, name: str, **more) -> JobConfig:
    return JobConfig.model_validate(
        {
            "run_dir": str(folder),
            "steps": 3,
            "deterministic": True,
            "rollout": {"group_size": 1, "groups_per_step": 4},
            "checkpoint": {"every_steps": 1},
            "engine": {"threads": 1},
            "trainer": {"threads": 1},
            "server": {"port": 0},
            "policies": {"policy": {"model": "tiny-random", "max_context": 256, "sampling": {"max_tokens": 8}}},
            "algorithm": {
                "name": name,
                "discount": 0.9,
                "critic": {"warmup_steps": 1, "optimizer": {"learning_rate": 1e-3}},
                "kl": {"coefficient": 0.1, "target": 0.01, "place": "reward"},
                "entropy_coefficient": 0.001,
            },
        }
        | more
    )


def train(config: JobConfig, **more):
    return palestra.train(RolloutSpec(environment=Lengths), TASKS, config, quiet=True, **more)


def files(checkpoint) -> dict[str, bytes]:
    """Weights and moments of the policy and of the critic, and what is remembered."""
    found = {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    state = json.loads((checkpoint / "checkpoint.json").read_text())["state"]
    return found | {"state": json.dumps(state["regularization"]).encode()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_a_job_with_a_critic_ends_bit_for_bit_alike_whether_it_was_stopped_or_not(tmp_path, name):
    whole = train(job(tmp_path / "whole", name))
    train(job(tmp_path / "cut", name, steps=2))
    resumed = train(job(tmp_path / "cut", name), resume=True)
    wanted = files(whole.checkpoint)
    assert {"model.safetensors", "critic-weights-0.safetensors", "critic-optimizer-0.safetensors"} <= wanted.keys()
    assert files(resumed.checkpoint) == wanted
    rows = whole.metrics
    assert [row["version"] for row in rows] == [0, 1, 2]
    assert rows[0]["train/kl_at_sampling"] == pytest.approx(0.0, abs=1e-3)  # the reference is the policy at the start
    assert rows[2]["train/reference_kl_k3"] > 0
    assert rows[2]["train/critic_error_mean"] > 0
    assert rows[0]["train/kl_coefficient"] != rows[2]["train/kl_coefficient"]
    with browse(tmp_path / "whole" / "run.db") as connection:
        played = list_episodes(connection, "train", "completed", 1)
        steps = read_episode(connection, played[0].episode_id).trajectory.steps
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, True)]


def test_a_reference_that_is_not_there_is_refused_before_anything_is_played(tmp_path):
    config = job(tmp_path, "ppo")
    missing = config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(
                update={"kl": config.algorithm.kl.model_copy(update={"reference": str(tmp_path / "nothing")})}
            )
        }
    )
    with pytest.raises((ConfigError, palestra.errors.ModelError), match="nothing"):
        train(missing)
