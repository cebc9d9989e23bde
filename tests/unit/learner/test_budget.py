from __future__ import annotations

import contextlib
import json
from itertools import accumulate

import pytest

from palestra.types.states import JobState
from unit.building import open_store
from unit.learner.scripted_job import Crash, ScriptedJob, config

pytestmark = pytest.mark.ci

STEPS = 6


def rows(folder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
async def sampled(tmp_path) -> list[int]:
    """The tokens sampled after each step of a job without a budget, in which no group is replaced."""
    await ScriptedJob(tmp_path / "without", config(steps=STEPS)).run()
    return [0, *accumulate(int(row["rollout/completion_tokens"]) for row in rows(tmp_path / "without")[1:])]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "less"), [(1, 0), (2, 0), (2, 1), (5, 1)])
async def test_training_ends_with_the_step_that_reaches_the_budget(tmp_path, sampled, steps, less):
    job = ScriptedJob(tmp_path / "run", config(steps=1000, token_budget=sampled[steps] - less))
    await job.run()
    assert job.progress.state is JobState.COMPLETED
    found = rows(tmp_path / "run")
    assert [row.get("rollout/sampled_tokens", 0) for row in found] == sampled[: steps + 1]
    assert "validation/reward_mean" in found[-1]
    assert max(p.name for p in (job.folder.path / "checkpoints").iterdir()) == f"step-{steps:06d}"


async def test_one_token_more_than_a_step_samples_takes_another_step(tmp_path, sampled):
    await ScriptedJob(tmp_path / "run", config(steps=1000, token_budget=sampled[2] + 1)).run()
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]


async def test_the_most_steps_hold_with_a_budget_too(tmp_path, sampled):
    await ScriptedJob(tmp_path / "run", config(steps=2, token_budget=sampled[-1])).run()
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]


async def test_a_finished_run_that_is_resumed_trains_no_further_step(tmp_path, sampled):
    settings = config(steps=1000, token_budget=sampled[2])
    weights = await ScriptedJob(tmp_path / "run", settings).run()
    again = ScriptedJob(tmp_path / "run", settings)
    assert await again.run() == weights
    assert again.progress.state is JobState.COMPLETED
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.slow
async def test_a_run_that_crashed_anywhere_ends_with_the_same_step_and_weights(tmp_path, sampled):
    optimizer = {"schedule": "linear", "learning_rate": 1e-3}
    budget = sampled[2] + 1
    settings = config(steps=1000, token_budget=budget, policies={"policy": {"model": "none", "optimizer": optimizer}})
    weights = await ScriptedJob(tmp_path / "whole", settings).run()
    columns = ("step", "rollout/sampled_tokens", "train/learning_rate")
    wanted = [[row.get(name) for name in columns] for row in rows(tmp_path / "whole")]
    before = [0, *(tokens for _, tokens, _ in wanted[1:])]
    assert [rate for _, _, rate in wanted[1:]] == pytest.approx(
        [1e-3 * (1 - tokens / budget) for tokens in before[:-1]]
    )
    crashes = 0
    for number in range(12, 90, 7):
        folder = tmp_path / str(number)
        with contextlib.suppress(Crash):
            assert await ScriptedJob(folder, settings, crash_at=number).run() == weights
            continue
        crashes += 1
        assert await ScriptedJob(folder, settings).run() == weights
        assert [[row.get(name) for name in columns] for row in rows(folder)] == wanted
    assert crashes > 5


@pytest.mark.slow
async def test_a_validation_is_made_whenever_so_many_tokens_more_were_sampled(tmp_path, sampled):
    every = int(1.5 * sampled[1])
    evaluation = {"every_steps": 1, "every_tokens": every}
    await ScriptedJob(tmp_path / "run", config(steps=STEPS, evaluation=evaluation)).run()
    scored = [row["step"] for row in rows(tmp_path / "run") if "validation/reward_mean" in row]
    passed = [step for step in range(1, STEPS) if sampled[step] // every > sampled[step - 1] // every]
    assert scored == [0, *passed, STEPS]
    assert 1 < len(passed) < STEPS - 1


async def test_tokens_of_replaced_groups_are_counted_and_those_of_other_policies_are_not(tmp_path, sampled):
    with open_store(tmp_path / "without") as store:
        count = store.groups.sampled_tokens
        assert await count(range(1, 3), ("policy",)) == sampled[2]
        assert await count(range(2, 3), ("policy",)) == sampled[2] - sampled[1]
        assert await count(range(1, 3), ("other",)) == 0
        assert await count(range(0, 1), ("policy",)) == 0  # validation is not training
        await store.db.write(
            lambda connection: connection.exec_driver_sql("UPDATE groups SET state = 'skipped' WHERE group_index = 0")
        )
        assert await count(range(1, 3), ("policy",)) == sampled[2]


@pytest.mark.parametrize(("every", "left"), [(2, [3, 3, 2, 2, 1, 1]), (4, [2, 2, 2, 2, 1, 1]), (0, [0] * STEPS)])
async def test_what_is_left_to_evaluate_counts_that_of_the_newest_step(tmp_path, every, left):
    job = ScriptedJob(tmp_path / "run", config(steps=STEPS, evaluation={"every_steps": every}))
    seen, finish = [], job.learner._finish_step

    async def seen_before(row):
        if row["step"]:
            seen.append(job.progress.evaluations_left)
        return await finish(row)

    job.learner._finish_step = seen_before
    await job.run()
    assert seen == left


async def test_the_last_evaluation_of_a_budget_of_tokens_is_still_to_come(tmp_path, sampled):
    job = ScriptedJob(tmp_path / "run", config(steps=1000, token_budget=sampled[3], evaluation={"every_steps": 50}))
    seen, finish = [], job.learner._finish_step

    async def seen_before(row):
        seen.append(job.progress.evaluations_left)
        return await finish(row)

    job.learner._finish_step = seen_before
    await job.run()
    assert seen[-1] == 1
