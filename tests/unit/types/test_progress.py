from __future__ import annotations

import pytest

from palestra.errors import IllegalTransition
from palestra.types.progress import JobProgress, exact_duration, short_number
from palestra.types.states import JobState


def progress() -> JobProgress:
    return JobProgress(job="j", steps=10, run_dir="r")


def test_a_job_moves_through_its_lifecycle_and_keeps_the_reason():
    job = progress()
    job.move(JobState.RUNNING)
    assert not job.over
    job.move(JobState.FAILED, "no disk")
    assert (job.state, job.reason, job.over) == (JobState.FAILED, "no disk", True)


@pytest.mark.parametrize("end", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
def test_what_is_over_stays_over(end):
    job = progress()
    job.move(JobState.RUNNING)
    job.move(end)
    assert job.over
    with pytest.raises(IllegalTransition, match="job j"):
        job.move(JobState.RUNNING)
    assert job.state is end


def test_the_time_left_is_the_mean_of_the_last_ten_steps_times_what_is_left():
    job = progress()
    assert job.seconds_left is None
    job.step_seconds = [5.0]
    assert job.seconds_left is None
    job.step_seconds, job.step = [100.0] * 3 + [2.0] * 10, 4
    assert job.seconds_left == 12.0
    job.step = 10
    assert job.seconds_left == 0.0


def test_a_first_step_that_warms_up_and_evaluations_that_come_are_seen_after_the_second_step(monkeypatch):
    job = progress()
    job.steps, job.step = 12, 2
    job.step_seconds, job.evaluation_seconds, job.evaluations_left = [60.0, 5.0], [20.0], 2
    assert job.seconds_left == 10 * 5.0 + 2 * 20.0
    monkeypatch.setattr("time.monotonic", lambda: 103.0)
    job.step_began = 100.0
    assert job.seconds_left == 10 * 5.0 - 3.0 + 2 * 20.0
    job.step_began = 0.0  # this step takes longer than the ones before
    assert job.seconds_left == 9 * 5.0 + 2 * 20.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.5, "0.5 s"), (45, "45 s"), (90.5, "1 min 30.5 s"), (5400, "1 h 30 min"), (86_400, "24 h"), (0, "0 s")],
)
def test_an_exact_duration_is_not_rounded(seconds, words):
    assert exact_duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.03333, "0.0333"),
        (-1.5, "-1.5"),
        (999.4, "999"),
        (999.6, "1,000"),
        (-1352.4, "-1,352"),
        (2e6, "2e+06"),
    ],
)
def test_a_short_number_of_thousands_is_written_out(value, text):
    assert short_number(value) == text
