"""When a step and its evaluation began and ended, as spans say it."""

from __future__ import annotations

from palestra.tracking.run_spans import spans_of_row

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
