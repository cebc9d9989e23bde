"""Jobs with `sac`: they learn, end alike however they were stopped, and are refused without choices."""

from __future__ import annotations

import json

import pytest

import palestra
from palestra import JobConfig, ModelAgent, RolloutSpec
from palestra.envs import Environment
from palestra.errors import ConfigError, PalestraError

NUMBERS = {"A": "0", "B": "1", "C": "2", "D": "33"}
CHOICES = ModelAgent(choices=tuple(NUMBERS.values()), max_tokens=4)


class Letters(Environment):
    """Two letters, one after the other; each has a number, which is to be said."""

    blocking = False
    system = "Say its number."
    max_steps = None

    def reset(self, task):
        self.letters = list(task["text"])
        return self.letters[0], {}

    def step(self, action):
        right = float(action == NUMBERS[self.letters.pop(0)])
        return (self.letters[0] if self.letters else "done"), right, not self.letters, False, {}


def job(folder, **more) -> JobConfig:
    return JobConfig.model_validate(
        {
            "run_dir": str(folder),
            "steps": 4,
            "deterministic": True,
            "rollout": {"group_size": 2, "groups_per_step": 2},
            "checkpoint": {"every_steps": 1},
            "engine": {"threads": 1, "dtype": "float32"},
            "trainer": {"threads": 1, "dtype": "float32"},
            "server": {"port": 0},
            "evaluation": {"every_steps": 0},
            "policies": {"policy": {"model": "tiny-random", "max_context": 256, "optimizer": {"learning_rate": 2e-3}}},
            "algorithm": {
                "name": "sac",
                "discount": 0.9,
                "critic": {"optimizer": {"learning_rate": 2e-3}},
                "replay": {"draws": 3, "episodes": 3},
            },
        }
        | more
    )


def train(config: JobConfig, agent=CHOICES, tasks=("AB", "CD"), **more):
    spec = RolloutSpec(environment=Letters, agents={"agent": agent})
    return palestra.train(spec, [{"text": text} for text in tasks], config, quiet=True, **more)


def files(checkpoint) -> dict[str, bytes]:
    """Weights and moments of policy, critic and copy, and the temperature."""
    found = {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    state = json.loads((checkpoint / "checkpoint.json").read_text())["state"]
    return found | {"state": json.dumps(state["algorithm"]).encode()}


@pytest.mark.slow
def test_a_job_ends_bit_for_bit_alike_whether_it_was_stopped_or_not(tmp_path):
    """The second life reads the episodes of earlier steps out of the run store again."""
    whole = train(job(tmp_path / "whole"))
    train(job(tmp_path / "cut", steps=2))
    resumed = train(job(tmp_path / "cut"), resume=True)
    wanted = files(whole.checkpoint)
    assert {f"critic-{part}-0.safetensors" for part in ("weights", "optimizer", "target")} <= wanted.keys()
    assert b"log_temperature" in wanted["state"]
    assert files(resumed.checkpoint) == wanted
    rows = whole.metrics
    assert [row["version"] for row in rows] == [0, 1, 2, 3, 4][-len(rows) :]
    last = rows[-1]
    assert last["train/decisions"] == 3 * 2  # three episodes of two calls each, in the last of three draws
    assert last["train/rows"] == 3 * 3 * 2 * 4  # draws x episodes x calls x choices
    assert last["train/episodes"] == 4  # those of the step's own manifest
    assert last["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
def test_it_learns_which_choice_is_right(tmp_path):
    config = job(
        tmp_path,
        steps=24,
        deterministic=False,
        rollout={"group_size": 8, "groups_per_step": 4},
        checkpoint={"every_steps": 100},
        algorithm={
            "name": "sac",
            "critic": {"warmup_steps": 6, "optimizer": {"learning_rate": 2e-3}},
            "replay": {"draws": 8, "episodes": 32},
        },
    )
    rows = train(config, tasks=("A", "B", "C", "D")).metrics
    assert rows[1]["train/reward_mean"] < 0.5
    assert sum(row["train/reward_mean"] for row in rows[-4:]) / 4 > 0.65  # by chance 0.25


def test_agents_without_choices_are_refused_before_anything_is_played(tmp_path):
    with pytest.raises(ConfigError, match=r"sac.*choices"):
        train(job(tmp_path), agent=ModelAgent(max_tokens=4))
    assert not (tmp_path / "run.db").exists()


class Undecided(ModelAgent):
    """Has choices, and does not use them."""

    async def step(self, observation, policy):
        chat = await policy.chat((*policy.history, *observation.content), max_tokens=4)
        return [chat], chat.reply


def test_a_call_without_choices_ends_the_job_with_its_name(tmp_path):
    with pytest.raises(PalestraError, match=r"0.*train-000000-00"):
        train(job(tmp_path), agent=Undecided(choices=("0", "1")))


@pytest.mark.slow
def test_what_follows_the_policy_waits_while_only_the_critic_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.algorithms.sac.TEMPERATURE_RATE", 0.1)
    config = job(tmp_path)
    waiting = config.algorithm.model_copy(
        update={"critic": config.algorithm.critic.model_copy(update={"warmup_steps": 2})}
    )
    rows = train(config.model_copy(update={"algorithm": waiting})).metrics
    at = {row["step"]: row for row in rows}
    assert at[1]["train/temperature"] == at[2]["train/temperature"] == pytest.approx(waiting.temperature)
    assert at[4]["train/temperature"] != pytest.approx(waiting.temperature)
    assert [row["version"] for row in rows] == [0, 0, 1, 2][-len(rows) :]
    assert at[1]["rollout/staleness_max"] == 0
    assert at[4]["rollout/staleness_max"] > 0  # of what is drawn again
