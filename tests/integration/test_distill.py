"""A tiny model learns from another one's probabilities of its own tokens, without a reward."""

from __future__ import annotations

import pytest

import palestra
from palestra import JobConfig

ANSWERS = {"2 + 2 =": "4", "3 + 4 =": "7"}
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


def right(task, answer):
    return float(answer == ANSWERS[task["prompt"]])


def job(folder, steps: int, algorithm: dict, rate: float, model: str = "tiny-random", **others) -> JobConfig:
    policy = {
        "model": model,
        "max_context": 128,
        "sampling": {"max_tokens": 2},
        "optimizer": {"learning_rate": rate},
    }
    return JobConfig.model_validate(
        {
            "run_dir": str(folder),
            "steps": steps,
            "policies": {"student": policy} | others,
            "rollout": {"group_size": 32, "groups_per_step": 2},
            "algorithm": algorithm,
            "evaluation": {"every_steps": steps},
            "engine": {"dtype": "float32", "threads": 1},
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def taught(folder, steps: int) -> palestra.TrainResult:
    """A model that was taught the answers for so many steps, by supervised fine-tuning."""
    config = job(folder, steps, {"name": "sft"}, 5e-3)
    return palestra.train(reward=right, tasks=CONVERSATIONS, validation_tasks=TASKS, config=config, quiet=True)


@pytest.mark.long
def test_a_student_becomes_like_its_teacher_and_rewards_play_no_part(tmp_path):
    teacher, beginner = taught(tmp_path / "teacher", 30), taught(tmp_path / "beginner", 6)
    assert teacher.metrics[-1]["validation/reward_mean"] == 1.0
    assert beginner.metrics[-1]["validation/reward_mean"] < 1.0
    config = job(
        tmp_path / "student",
        80,
        {"name": "distill"},
        2e-3,
        model=str(beginner.checkpoint),
        big={"model": str(teacher.checkpoint), "frozen": True, "max_context": 128},
    )
    # Every training episode has the reward 0; validation is scored as it is.
    result = palestra.train(
        reward=lambda task, answer: right(task, answer) * task.get("counts", 0.0),
        tasks=TASKS,
        validation_tasks=[{**task, "id": f"v {task['id']}", "counts": 1.0} for task in TASKS],
        config=config,
        quiet=True,
    )
    divergence = [row["train/teacher_kl"] for row in result.metrics[1:]]
    assert sum(divergence[-10:]) / 10 < 0.3 * divergence[0]
    assert {row["train/reward_mean"] for row in result.metrics[1:]} == {0.0}
    assert result.metrics[-1]["validation/reward_mean"] == 1.0
