"""Ctrl-C: the step is finished or dropped whole, a checkpoint is written, and `--resume` goes on."""

from __future__ import annotations

import signal

import pytest
import safetensors.torch
import torch
from outcome import assert_complete, assert_same_metrics
from servers import SCRIPTED, TINY, Job, Plane, Process, until

RARELY = {"checkpoint": {"every_steps": 100}}  # so that it is the interruption that saves


def interrupt(server: Process, number: signal.Signals = signal.SIGINT) -> None:
    server.send(number)
    assert server.wait() == 130, server.output
    assert "--resume" in server.output
    assert "Traceback" not in server.output


def resume(job: Job) -> None:
    job.start("--resume")
    job.finish()
    assert_complete(job)


def saved(job: Job) -> list[str]:
    return [path.name for path in job.checkpoints()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_gathering_the_step_is_dropped_and_nothing_handed_in_is_lost(tmp_path, undisturbed, number):
    settings = SCRIPTED | RARELY | {"rollout": {**SCRIPTED["rollout"], "lease_seconds": 1.0}}
    with Job(tmp_path, settings) as job:
        server = job.start()
        worker = job.work("--threads", "1", "--stop-after", "chat", "--stop-in", "train-000002")
        until(lambda: job.worker_log("stops"), "the worker is in the middle of step 2")
        assert len(job.manifests()) == 1
        interrupt(server, number)
        assert saved(job) == ["step-000001"]
        accepted = {entry["episode"] for entry in job.worker_log("ended")}
        worker.send(signal.SIGCONT)
        resume(job)
        assert accepted <= {entry["episode"] for entry in job.worker_log("ended")}
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


@pytest.mark.slow
def test_while_training_the_step_is_finished_and_saved(tmp_path, undisturbed_tiny):
    with Job(tmp_path, TINY | RARELY) as job:
        server = job.start()
        job.work()
        until(lambda: (job.run_dir / "run.db").exists() and job.manifests().get(2), "step 2 is fixed, and trains")
        trained = [row["step"] for row in job.query("SELECT step FROM metric_rows")]
        interrupt(server)
        assert trained == [0, 1]
        assert saved(job) == ["step-000002"]
        resume(job)
        assert_same_metrics(job, undisturbed_tiny)
        found, wanted = (
            safetensors.torch.load_file(run.checkpoints()[-1] / "model.safetensors") for run in (job, undisturbed_tiny)
        )
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.slow
def test_while_evaluating_the_evaluation_is_made_up_for(tmp_path, undisturbed):
    """Each validation is one row's; a row that was interrupted is not written half."""
    with Job(tmp_path, SCRIPTED | RARELY) as job:
        server = job.start()
        job.work("--threads", "1", "--stop-after", "claim", "--stop-in", "validation-000003")
        until(lambda: job.worker_log("stops"), "the evaluation after step 1 is half done")
        interrupt(server)
        assert saved(job) == ["step-000001"]
        assert [row["step"] for row in job.metrics()] == [0]
        job.workers[-1].send(signal.SIGCONT)
        resume(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_during_the_last_evaluation_the_job_is_not_completed_and_the_evaluation_is_made_up_for(
    tmp_path, undisturbed, number
):
    with Job(tmp_path, SCRIPTED | RARELY) as job:
        server = job.start()
        job.work("--threads", "1", "--stop-after", "claim", "--stop-in", "validation-000007")
        until(lambda: job.worker_log("stops"), "the evaluation after the last step is half done")
        interrupt(server, number)
        assert saved(job)[-1] == "step-000003"
        assert [row["step"] for row in job.metrics()] == [0, 1, 2]
        assert [row["step"] for row in job.query("SELECT step FROM metric_rows ORDER BY step")] == [0, 1, 2]
        assert job.query("SELECT count(*) AS n FROM events WHERE kind = 'completed'")[0]["n"] == 0
        job.workers[-1].send(signal.SIGCONT)
        resume(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


@pytest.mark.slow
def test_before_anything_happened_nothing_is_saved_and_resume_starts(tmp_path, undisturbed):
    with Job(tmp_path, SCRIPTED | RARELY) as job:
        interrupt(job.start())
        assert saved(job) == []
        job.start("--resume")
        job.work()
        job.finish()
        assert_complete(job)
        assert job.weights() == undisturbed.weights()


@pytest.mark.slow
def test_calls_in_flight_are_answered_503_and_sent_again_by_the_openai_client(tmp_path, undisturbed):
    settings = SCRIPTED | RARELY | {"engine": {**SCRIPTED["engine"], "delay_seconds": 0.25}}
    with Job(tmp_path, settings) as job, Plane(job.url) as plane:
        server = job.start()
        job.work("--threads", "2")
        until(lambda: len(job.worker_log("ended")) >= 5 and plane.status()["calls"]["in_flight"], "calls in flight")
        interrupt(server)
        resume(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()
