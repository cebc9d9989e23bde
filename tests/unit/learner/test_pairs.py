"""Pairs of episodes as groups of a job: of conversations, and the best and the worst of each group of a run."""

from __future__ import annotations

import contextlib
import json
from itertools import groupby
from pathlib import Path

import pytest
from pydantic import ValidationError

from palestra.algorithms.preference import DPO, RewardModeling
from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.renderers import ByteTokenizer
from palestra.types.records import Task
from unit.building import metric_names
from unit.learner.scripted_job import Crash, ScriptedJob, config
from unit.learner.test_recordings import of, run_until_refused, tokens

PAIR = Task(
    task_id="pair",
    data={
        "prompt": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "Sure?"},
        ],
        "chosen": "No, 4",
        "rejected": "Yes",
    },
)


def dpo(source: Path | None = None, **more) -> JobConfig:
    algorithm = {"name": "dpo"} | ({} if source is None else {"from_run": str(source)}) | more
    return config(algorithm=algorithm, steps=2)


async def test_only_the_replies_after_the_shared_prompt_are_trained(tmp_path):
    await ScriptedJob(tmp_path, dpo(), tasks=[PAIR]).run()
    chosen, rejected, *_ = of(tmp_path)
    assert [(each.episode.group_index, each.episode.reward) for each in (chosen, rejected)] == [(0, 1.0), (0, 0.0)]
    tokenizer = ByteTokenizer()
    for trajectory, reply in ((chosen, "No, 4"), (rejected, "Yes")):
        ((ids, targets, _),) = tokens(trajectory)
        trained = [token for token, target in zip(ids, targets, strict=True) if target]
        assert tokenizer.decode(trained) == f"{reply}<|im_end|>"
        assert "3<|im_end|>" in tokenizer.decode(ids)
    assert len(of(tmp_path)) == 2 * 2 * 2  # two steps of two pairs


async def test_pairs_write_their_metrics_and_none_that_compares_with_what_was_sampled(tmp_path):
    await ScriptedJob(tmp_path, dpo(), tasks=[PAIR]).run()
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        assert {f"train/{metric.name}" for metric in DPO.metrics} <= row.keys() <= metric_names()
        assert not {"train/logprob_gap_mean", "train/sampling_kl", "train/kl_at_sampling"} & row.keys()


@pytest.mark.parametrize("key", ["policies.policy.adapter", "tasks.validation"])
def test_a_model_of_rewards_has_neither_an_adapter_nor_validation(key):
    more = {
        "policies.policy.adapter": {"policies": {"policy": {"adapter": {"rank": 4}}}},
        "tasks.validation": {"tasks": {"validation": "held-out.jsonl"}},
    }
    with pytest.raises(ValidationError, match=rf"leave.*{key}"):
        JobConfig.model_validate({"name": "j", "algorithm": {"name": "reward_model"}, **more[key]})
    JobConfig.model_validate({"name": "j", "algorithm": {"name": "dpo"}, **more[key]})
    off = {"evaluation": {"every_steps": 0}}
    if key == "tasks.validation":
        JobConfig.model_validate({"name": "j", "algorithm": {"name": "reward_model"}, **more[key], **off})


async def test_a_model_of_rewards_leaves_the_policy_as_it_is(tmp_path):
    settings = config(algorithm={"name": "reward_model"}, steps=2, evaluation={"every_steps": 0})
    job = ScriptedJob(tmp_path, settings, tasks=[PAIR])
    await job.run()
    weights = job.trainer._policy("policy").weights
    assert job.trainer.version("policy").n == 0
    assert weights["critic"] != weights["policy"]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        assert {f"train/{metric.name}" for metric in RewardModeling.metrics} <= row.keys() <= metric_names()
        assert row["train/critic_grad_norm"] >= 0
        assert "train/grad_norm" not in row


@pytest.fixture
async def source(tmp_path) -> Path:
    await ScriptedJob(tmp_path / "source", config()).run()
    return tmp_path / "source"


def best_and_worst(source: Path) -> list[tuple[str, str]]:
    """By hand: of each group with unequal rewards the first episode of the largest and of the smallest."""
    found = []
    for _, members in groupby(of(source), key=lambda trajectory: trajectory.episode.group_index):
        rewards = {each.episode.episode_id: each.episode.reward for each in members}
        if len(set(rewards.values())) > 1:
            ordered = sorted(rewards, key=rewards.get)
            worst = ordered[0]
            best = next(name for name in rewards if rewards[name] == rewards[ordered[-1]])
            found.append((best, worst))
    return found


async def test_the_best_and_the_worst_episode_of_each_group_of_a_run_are_its_pair(tmp_path, source):
    await ScriptedJob(tmp_path / "job", dpo(source)).run()
    pairs, found = best_and_worst(source), of(tmp_path / "job")
    assert pairs
    recorded = {each.episode.episode_id: each for each in of(source)}
    for chosen, rejected in zip(found[::2], found[1::2], strict=True):
        names = [each.episode.metadata["recorded"].rpartition("/")[2] for each in (chosen, rejected)]
        assert tuple(names) in pairs
        assert chosen.episode.reward > rejected.episode.reward
        assert [tokens(each) for each in (chosen, rejected)] == [tokens(recorded[name]) for name in names]


@pytest.mark.slow
async def test_a_job_of_pairs_that_crashed_anywhere_ends_with_the_same_weights(tmp_path, source):
    weights = await ScriptedJob(tmp_path / "whole", dpo(source)).run()
    crashes = 0
    for number in range(3, 40, 3):
        folder = tmp_path / str(number)
        with contextlib.suppress(Crash):
            assert await ScriptedJob(folder, dpo(source), crash_at=number).run() == weights
            continue
        crashes += 1
        assert await ScriptedJob(folder, dpo(source)).run() == weights
    assert crashes > 5


async def test_a_run_of_equal_rewards_has_no_pair(tmp_path):
    alone = config(rollout={"group_size": 1}, algorithm={"name": "reinforce_pp"})
    await ScriptedJob(tmp_path / "source", alone).run()
    with pytest.raises(ConfigError, match="unequal rewards"):
        await run_until_refused(ScriptedJob(tmp_path / "job", dpo(tmp_path / "source")))


async def test_a_task_that_is_no_pair_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'t'.*pair"):
        await run_until_refused(ScriptedJob(tmp_path, dpo(), tasks=[Task(task_id="t", data={"text": "say 1"})]))


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 2},
        {"minibatches": 2},
        {"beta": 0},
        {"loss_agg_mode": "token-mean"},
        {"entropy_coefficient": 0.1},  # as any penalty, rewarded where loss weights are negative
        {"kl": {"coefficient": 0.1}},
    ],
)
def test_what_would_make_the_gradient_wrong_is_refused(change):
    with pytest.raises(ValidationError):
        dpo(**change)
