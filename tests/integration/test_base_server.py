"""Jobs on a base server, in processes of their own, of which some are killed: the bits are those of a job alone."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from base_servers import ALONE, POLICY, Base, assert_same
from outcome import assert_complete
from servers import Job, Process, run_through, until

pytestmark = pytest.mark.slow


@pytest.fixture
def base(tmp_path, monkeypatch) -> Iterator[Base]:
    made = Base(tmp_path)
    monkeypatch.setenv("PALESTRA_BASE_KEY_FILE", str(made.key))
    yield made
    for process in made.processes:
        process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[Job]:
    """The job with an engine and a trainer of its own."""
    with Job(tmp_path_factory.mktemp("alone"), ALONE) as job:
        run_through(job, [])
        yield job


def loads_torch(process: Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.popen.pid}/maps").read_text()


def test_a_job_that_is_killed_goes_on_and_its_neighbour_notices_nothing(base, alone):
    base.start()
    assert loads_torch(base.processes[0])
    with base.job("first") as first, base.job("second", seed=7) as second:
        second.start()
        second.work()
        server = first.start(fault="after_chat_commit:26")
        first.work()
        assert server.wait() == -signal.SIGKILL
        first.fresh = True  # so that it has only what it loads itself
        server = first.start("--resume")
        until(lambda: len(first.manifests()) > 1, "the job trains again")
        assert not loads_torch(server)
        first.finish()
        second.finish()
        assert_same(first, alone)
        assert_complete(second)
        assert len(second.servers) == 1
    assert base.processes[0].popen.poll() is None


@pytest.mark.parametrize(
    ("every", "fault"),
    [
        pytest.param(1, "before_step:2", id="before the update of step 2", marks=pytest.mark.long),
        pytest.param(10, "after_step:3", id="after the update of step 3, and all has to be repeated"),
        pytest.param(
            1, "before_checkpoint_rename:2", id="while the checkpoint of step 2 is written", marks=pytest.mark.long
        ),
    ],
)
def test_all_jobs_survive_the_death_of_the_base_server_in_their_own_processes(base, alone, every, fault):
    dying = base.start(fault)
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(base.job(name, checkpoint={"every_steps": every})) for name in ("first", "second")]
        for job in jobs:
            job.start()
            job.work()
        assert dying.wait() == -signal.SIGKILL
        assert all(job.servers[0].popen.poll() is None for job in jobs)
        base.start()
        for job in jobs:
            job.finish()
            assert len(job.servers) == 1
            assert_same(job, alone)
        events = [len(job.query("SELECT 1 FROM events WHERE kind = 'base_lost'")) for job in jobs]
        assert sum(events) >= 1


def test_a_base_server_that_dies_while_replies_are_sampled_is_survived(base, alone):
    dying = base.start()
    with base.job("first") as job:
        job.start()
        job.work()
        until(lambda: len(job.query("SELECT 1 FROM chats")) > 6, "the first episodes of step 1 are played")
        dying.kill()
        base.start()
        job.finish()
        assert_same(job, alone)


def test_a_job_that_names_another_base_or_has_no_key_says_so(base, monkeypatch):
    base.start()
    policy = POLICY | {"base": base.address}
    with base.job("other", policies={"policy": policy | {"model": "SmolLM2-135M-Instruct"}}) as job:
        server = job.serve()
        assert server.wait() == 2
        assert "'SmolLM2-135M-Instruct' and this base server has 'tiny-random'" in server.output
    with base.job("wide", policies={"policy": policy | {"adapter": {"rank": 4096}}}) as job:
        server = job.serve()
        assert server.wait() == 2
        assert "rank" in server.output
    monkeypatch.setenv("PALESTRA_BASE_KEY", "pb-" + "0" * 48)
    with base.job("stranger") as job:
        server = job.serve()
        assert server.wait() == 2
        assert "is no key of this server" in server.output


@pytest.mark.long
def test_a_deterministic_job_does_not_go_on_at_a_base_of_another_precision(base, alone):
    dying = base.start()
    with base.job("first") as job:
        job.start()
        job.work()
        until(lambda: len(job.checkpoints()) > 0, "the job trains")
        job.servers[0].kill()
        dying.kill()
        other = base.start(None, "--dtype", "float32")
        server = job.serve("--resume")
        assert server.wait() == 2
        assert "engine_dtype bfloat16, here float32" in server.output
        other.kill()
        base.start()
        job.start("--resume")
        job.finish()
        assert_same(job, alone)
