"""When a step and its evaluation began and ended, as spans say it."""

from __future__ import annotations

import sqlite3

import pytest

from palestra.store.browsing import browse
from palestra_trackers.opentelemetry import episodes_of_step, spans_of_row
from unit.dashboard.recorded import record

ROW = {"time/step_seconds": 10.0, "train/reward_mean": 0.5}
EVALUATED = {"time/validation_seconds": 60.0, "validation/reward_mean": 0.25}


def test_a_step_without_evaluation_ended_when_its_row_was_written():
    (own,) = spans_of_row(3, ROW, 1000.0).values()
    assert (own.name, own.start, own.end) == ("train_step", 990.0, 1000.0)
    assert own.attributes == {"palestra.step": 3, "palestra.time.step_seconds": 10.0, "palestra.train.reward_mean": 0.5}


def test_a_step_ended_before_its_evaluation_which_is_a_span_of_its_own():
    found = spans_of_row(3, ROW | EVALUATED, 1000.0)
    step, evaluation = found["train"], found["validation"]
    assert (step.name, step.start, step.end) == ("train_step", 930.0, 940.0)
    assert (evaluation.name, evaluation.start, evaluation.end) == ("evaluation", 940.0, 1000.0)
    assert evaluation.attributes["palestra.validation.reward_mean"] == 0.25
    assert "palestra.train.reward_mean" not in evaluation.attributes
    assert step.key != evaluation.key


def test_what_comes_before_the_first_step_is_an_evaluation_alone():
    (own,) = spans_of_row(0, EVALUATED, 1000.0).values()
    assert (own.name, own.start, own.end) == ("evaluation", 940.0, 1000.0)


async def spans_after(folder, change: str):
    """Spans of the episodes of a recorded run, of which the first has been changed, by id."""
    await record(folder)
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute(f"UPDATE episodes SET {change} WHERE episode_id = 'train-000000-00'")
    connection.close()
    with browse(folder / "run.db") as connection:
        return {one.attributes["gen_ai.conversation.id"]: one for one in episodes_of_step(connection, 5)}


async def test_an_episode_begins_when_it_is_claimed_and_not_with_its_first_call(tmp_path):
    found = (await spans_after(tmp_path, "claimed_at = 0.5, ended_at = 1900000000.0"))["train-000000-00"]
    assert (found.start, found.end) == (0.5, 1900000000.0)  # the first call was at 1.0


@pytest.mark.parametrize(
    ("reason", "failed"),
    [("not_scored: the rollout returned None", False), ("cancelled: its job has ended", False), ("KeyError: x", True)],
)
async def test_an_episode_that_is_left_out_on_purpose_is_no_error(tmp_path, reason, failed):
    found = await spans_after(tmp_path, f"state = 'discarded', rewards = NULL, reason = '{reason}'")
    assert found["train-000000-00"].failed == (reason if failed else None)
    assert found["train-000000-01"].failed is None
