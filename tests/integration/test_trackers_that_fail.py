"""Trackers that hang, raise or fill a disk, in processes that a real job has started: no step and no row less."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disks import small_disk
from outcome import assert_complete, assert_same_metrics
from servers import SCRIPTED, Job, Process, environment, until

pytestmark = pytest.mark.slow
MIB = 2**20
TRACKER = """
import time
from palestra.errors import StoreError

class Bad:
    def __init__(self, run): self.run = run
    def begin(self): pass
    def flush(self): pass
    def close(self, completed): pass
    def write(self, step, values, at):
        (self.run.folder / "wrote").touch()
        {write}
"""
FILL = """
        import time
        with (self.run.folder / "rows").open("ab", buffering=0) as file:
            while True:  # as fast as a disk, not as memory, so that looks of twice a second see less than the reserve
                time.sleep(0.01)
                file.write(bytes(2**20))"""


def plug_in(folder: Path, write: str) -> str:
    """Make a package with a tracker named `bad`, and return the path on which Python finds it."""
    (folder / "bad_tracker-1.dist-info").mkdir(parents=True)
    (folder / "bad_tracker-1.dist-info" / "METADATA").write_text("Name: bad-tracker\nVersion: 1\n")
    (folder / "bad_tracker-1.dist-info" / "entry_points.txt").write_text("[palestra.trackers]\nbad = bad_tracker:Bad\n")
    (folder / "bad_tracker.py").write_text(TRACKER.replace("{write}", write))
    return str(folder)


def play(job: Job, path: str) -> str:
    """Play a job whose tracker is in a package on `path`, and return what the server said."""
    command = [Path(sys.executable).with_name("palestra"), "run", job.config_file]
    job.servers.append(Process.start(command, job.folder / "server.log", settings={"PYTHONPATH": path}))
    job.wait_until_it_listens()
    job.work()
    job.finish()
    return job.servers[-1].output


@pytest.mark.parametrize(
    ("write", "said"),
    [
        ("raise RuntimeError('no such project')", "no such project"),
        ("time.sleep(600)", "ended with code"),
        ("(self.run.folder / 'row').write_bytes(bytes(8 * 2**20))", "No space left on device"),
    ],
    ids=["raises", "hangs", "fills a disk of its own"],
)
def test_a_tracker_that_fails_costs_no_step_and_no_row(tmp_path, undisturbed, write, said):
    with Job(tmp_path / "job", SCRIPTED | {"tracking": ["bad"]}) as job:
        with small_disk(job.run_dir / "tracking" / "bad", "4m"):
            output = play(job, plug_in(tmp_path / "path", write))
            assert (job.run_dir / "tracking" / "bad" / "wrote").exists(), "the tracker got a row"
        assert "the tracker bad ended with code" in output
        assert said in output
        assert_complete(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


def test_a_tracker_that_fills_the_disk_of_the_run_is_ended_before_the_run_lacks_room(tmp_path, undisturbed):
    with small_disk(tmp_path / "disk", "700m") as disk, Job(disk / "job", SCRIPTED | {"tracking": ["bad"]}) as job:
        output = play(job, plug_in(tmp_path / "path", FILL))
        assert "the tracker bad " in output
        assert "less than 256 MiB are free" in output
        # The run itself frees some room later, when it removes checkpoints; what the tracker wrote is left.
        assert (job.run_dir / "tracking" / "bad" / "rows").stat().st_size > 400 * MIB
        assert shutil.disk_usage(disk).free > 0
        assert_complete(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


def test_the_doctor_names_a_disk_that_fills(tmp_path):
    """A run of 3 of 30 steps on a disk that another program fills; before that, the doctor is silent about it."""
    settings = SCRIPTED | {"steps": 30, "evaluation": {"every_steps": 0}}
    with small_disk(tmp_path / "disk", "300m") as disk, Job(disk / "job", settings) as job:
        job.start()
        worker = job.work()
        until(lambda: len(job.manifests()) > 3, "the third step")
        worker.kill()
        assert "disk_fills" not in doctor(job)
        filler = os.open(disk / "other", os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(filler, 0, shutil.disk_usage(disk).free - 200 * MIB)
        os.close(filler)
        assert "0.20 GiB are free" in doctor(job)
        assert "disk_fills" in doctor(job)


def doctor(job: Job) -> str:
    """What `palestra doctor` says of a run that goes on."""
    command = [Path(sys.executable).with_name("palestra"), "doctor", job.run_dir]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=60).stdout
