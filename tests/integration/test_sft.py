"""A tiny model learns from what was recorded: conversations, good episodes of a run, pairs, and what is preferred."""

from __future__ import annotations

import pytest

import palestra
import palestra_judges
from palestra import JobConfig
from palestra.cli.main import main

STEPS = 80
ANSWERS = {"2 + 2 =": "4", "3 + 4 =": "7", "9 - 8 =": "1"}
TASKS = [{"id": question, "prompt": question} for question in ANSWERS]
CONVERSATIONS = [
    task
    | {
        "messages": [
            {"role": "user", "content": task["prompt"]},
            {"role": "assistant", "content": ANSWERS[task["prompt"]]},
        ]
    }
    for task in TASKS
]


def reward(task, answer):
    return float(answer == ANSWERS[task["prompt"]])


def job(folder, steps: int, algorithm: dict, **more) -> JobConfig:
    policy = {
        "model": "tiny-random",
        "max_context": 128,
        "sampling": {"max_tokens": 3},
        "optimizer": {"learning_rate": 5e-3, "schedule": "linear"},
    }
    return JobConfig.model_validate(
        {
            "run_dir": str(folder),
            "steps": steps,
            "policies": {"policy": policy},
            "rollout": {"group_size": 32, "groups_per_step": 3},
            "algorithm": algorithm,
            "evaluation": {"every_steps": steps},
            "engine": {"dtype": "float32", "threads": 1},
            "trainer": {"dtype": "float32", "threads": 1},
        }
        | more
    )


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> palestra.TrainResult:
    config = job(tmp_path_factory.mktemp("taught") / "run", STEPS, {"name": "sft"})
    return palestra.train(reward=reward, tasks=CONVERSATIONS, validation_tasks=TASKS, config=config, quiet=True)


@pytest.mark.slow
def test_conversations_are_learned_by_heart(taught):
    first, *_, last = taught.metrics
    assert (first["validation/reward_mean"], last["validation/reward_mean"]) == (0.0, 1.0)
    likelihood = [row["train/nll"] for row in taught.metrics[1:]]
    assert likelihood[0] > 4  # of 259 tokens, about log 259
    assert likelihood[-1] < 0.1
    # Each step has the three conversations once, and of each the reply with its end: two tokens.
    assert {row["train/trained_tokens"] for row in taught.metrics[1:]} == {6}
    assert {row["rollout/sampled_tokens"] for row in taught.metrics[1:]} == {6.0 * n for n in range(1, STEPS + 1)}


@pytest.mark.slow
def test_the_good_episodes_of_a_run_are_learned(taught, tmp_path):
    """One step of sampling from the taught model, then a fresh model learns the right answers among its samples."""
    played = job(tmp_path / "played", 1, {"name": "grpo"}, model=str(taught.checkpoint))
    source = palestra.train(reward=reward, tasks=TASKS, config=played, quiet=True)
    settings = {"name": "sft", "from_run": str(source.run_dir), "min_reward": 1.0}
    twelve = job(tmp_path / "run", STEPS, settings, rollout={"groups_per_step": 12})
    result = palestra.train(reward=reward, tasks=(), validation_tasks=TASKS, config=twelve, quiet=True)
    assert result.metrics[-1]["train/reward_mean"] == 1.0
    assert result.metrics[-1]["validation/reward_mean"] == 1.0
    without_validation = job(tmp_path / "without", 2, settings)
    assert len(palestra.train(reward=reward, config=without_validation, quiet=True).metrics) == 2


@pytest.mark.slow
def test_of_two_answers_the_preferred_one_becomes_more_likely_than_the_other(taught, tmp_path):
    """A model that knows the right answers learns to prefer another, as far as the log-ratio with its start says."""
    pairs = [{"prompt": question, "chosen": "8", "rejected": right} for question, right in ANSWERS.items()]
    settings = job(tmp_path / "run", 20, {"name": "dpo"}, model=str(taught.checkpoint))
    result = palestra.train(tasks=pairs, config=settings, quiet=True)
    first, last = result.metrics[0], result.metrics[-1]
    assert first["train/pair_loss"] == pytest.approx(0.6931, abs=1e-3), "policy and reference are equal"
    assert last["train/pair_accuracy"] == 1.0
    assert last["train/pair_loss"] < 0.6
    # The margin is beta times the change of the log-odds: by more than 2 nats here.
    assert last["train/pair_margin"] > 0.2
    assert not {"train/logprob_gap_mean", "train/sampling_kl"} & last.keys(), "nothing has sampled these replies"


@pytest.mark.slow
def test_a_model_of_rewards_is_exported_and_judges_as_it_was_taught(taught, tmp_path, capsys):
    """It learns that right answers are preferred, and then gives them the larger reward in another job."""
    pairs = [{"prompt": question, "chosen": right, "rejected": "8"} for question, right in ANSWERS.items()]
    settings = {"name": "reward_model", "critic": {"optimizer": {"learning_rate": 1e-3}}}
    result = palestra.train(tasks=pairs, config=job(tmp_path / "run", 40, settings), quiet=True)
    first, *_, last = result.metrics
    assert first["train/pair_loss"] == pytest.approx(0.6931, abs=1e-3), "every reward is 0 at first"
    assert last["train/pair_accuracy"] == 1.0
    assert last["train/pair_loss"] < 0.1
    assert abs(last["train/chosen_reward"] + last["train/rejected_reward"]) < 0.5 * last["train/pair_margin"]
    main(["export", str(result.run_dir), str(tmp_path / "rewards")])
    assert "the reward model after step 40" in capsys.readouterr().out
    judge = palestra_judges.RewardModel(path=tmp_path / "rewards")
    grpo = job(tmp_path / "judged", 1, {"name": "grpo"}, model=str(taught.checkpoint))
    judged = palestra.train(reward=judge, tasks=TASKS, config=grpo, quiet=True)
    given: dict[tuple[str, str], float] = {}
    run = palestra.load_run(judged.run_dir)
    replies = {row["episode_id"]: row["reply"].text for row in run.calls()}
    for row in run.episodes("train"):
        given[row["task_id"], replies[row["episode_id"]]] = row["reward"]
    for question, right in ANSWERS.items():
        assert given[question, right] > 0
        assert all(given[question, right] >= score for (asked, _), score in given.items() if asked == question)
