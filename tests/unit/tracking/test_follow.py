"""What a tracker gets of a run: each row once, also where a resumed job has replaced some; and what it can't break."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from pathlib import Path

import pytest

from palestra.cli.main import main
from palestra.config import parse_config
from palestra.errors import ConfigError, StoreError
from palestra.process.child import start_process
from palestra.tracking import process as following
from palestra.tracking.process import Follower, completed, follow_run, tracked_run, tracking
from palestra.tracking.registry import check_trackers, create_tracker, known_trackers
from unit.building import FakeClock, open_store
from unit.dashboard.recorded import record


class Kept:
    """A tracker in memory."""

    def __init__(self) -> None:
        self.rows, self.begun, self.flushed, self.closed = [], 0, 0, None

    def begin(self) -> None:
        self.begun, self.rows = self.begun + 1, []

    def write(self, step, values, at) -> None:
        self.rows.append((step, values["train/reward_mean"], at))

    def flush(self) -> None:
        self.flushed += 1

    def close(self, completed) -> None:
        self.closed = completed


async def put(folder, rows) -> None:
    """Write rows (step, reward), with their events, as a job does."""
    clock = FakeClock()
    with open_store(folder, clock) as store:
        for step, reward in rows:
            clock.advance(10.0)
            row = {"step": float(step), "train/reward_mean": reward, "wall_seconds": 10.0 * step}
            await store.log.put_metrics(step, row)
            await store.log.add_event("step", row)


async def drop(folder, step) -> None:
    """Drop the rows after a step, as a job does that is resumed from its checkpoint."""
    with open_store(folder, FakeClock()) as store:
        await store.log.restore_metrics(step)


def steps(tracker) -> list[tuple[int, float]]:
    return [(step, reward) for step, reward, _ in tracker.rows]


async def test_each_row_is_handed_over_once(tmp_path):
    kept = Kept()
    follower = Follower(tmp_path, kept)
    await put(tmp_path, [(0, 0.0), (1, 0.1)])
    assert follower.look() == 2
    assert follower.look() == 0
    await put(tmp_path, [(2, 0.2)])
    assert follower.look() == 1
    assert steps(kept) == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert (kept.begun, kept.flushed) == (1, 2)
    assert [at - FakeClock().wall for _, _, at in kept.rows] == [10.0, 20.0, 10.0]  # `put` has a clock each time


async def test_rows_that_a_resumed_job_replaces_are_there_once_and_new(tmp_path):
    kept = Kept()
    follower = Follower(tmp_path, kept)
    await put(tmp_path, [(1, 0.1), (2, 0.2), (3, 0.3)])
    follower.look()
    await drop(tmp_path, 1)
    follower.look()
    assert steps(kept) == [(1, 0.1)]
    await put(tmp_path, [(2, 0.25)])
    follower.look()
    assert steps(kept) == [(1, 0.1), (2, 0.25)]


async def test_rows_that_were_replaced_between_two_looks_are_noticed(tmp_path):
    kept = Kept()
    follower = Follower(tmp_path, kept)
    await put(tmp_path, [(1, 0.1), (2, 0.2)])
    follower.look()
    await drop(tmp_path, 1)
    await put(tmp_path, [(2, 0.25), (3, 0.3)])
    follower.look()
    assert steps(kept) == [(1, 0.1), (2, 0.25), (3, 0.3)]


async def test_a_new_process_begins_again(tmp_path):
    await put(tmp_path, [(1, 0.1)])
    first, second = Kept(), Kept()
    Follower(tmp_path, first).look()
    Follower(tmp_path, second).look()
    assert steps(first) == steps(second) == [(1, 0.1)]
    assert second.begun == 1


async def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    class Whole(Kept):
        def write(self, step, values, at):
            self.rows.append(dict(values))

    kept = Whole()
    with open_store(tmp_path, FakeClock()) as store:
        row = {"step": 1.0, "a": 1.0, "b": math.nan, "c": math.inf}
        await store.log.put_metrics(1, row)
        await store.log.add_event("step", row)
    Follower(tmp_path, kept).look()
    assert kept.rows == [{"a": 1.0}]


async def test_following_ends_with_the_job_and_reads_what_came_last(tmp_path):
    await record(tmp_path)
    kept, looks = Kept(), iter([True, True, False])
    with open_store(tmp_path, FakeClock()) as store:
        for step in (4, 5):
            await store.log.add_event("step", {"step": float(step)})
        await store.log.add_event("completed", {"step": 5})
    assert follow_run(tmp_path, kept, lambda: next(looks)) == 2
    assert (steps(kept), kept.closed, completed(tmp_path)) == ([(4, 0.5), (5, 0.625)], True, True)


async def test_the_last_bytes_of_a_disk_are_left_for_the_run(tmp_path, monkeypatch):
    await put(tmp_path, [(1, 0.1)])
    monkeypatch.setattr(following.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20})())
    kept = Kept()
    with pytest.raises(StoreError, match="256 MiB"):
        Follower(tmp_path, kept).look()
    assert kept.begun == 0


async def test_settings_have_no_address_of_the_job(tmp_path):
    await record(tmp_path)
    run = tracked_run(tmp_path, "tensorboard")
    assert run.settings["rollout.group_size"] == 8
    assert run.settings["steps"] == 8
    assert not any(name.startswith(("server", "run_dir")) for name in run.settings)
    assert run.folder == tmp_path / "tracking" / "tensorboard"
    assert tracked_run(tmp_path, "wandb").key == run.key


def test_names_of_trackers(tmp_path, monkeypatch):
    assert known_trackers() == ["mlflow", "opentelemetry", "tensorboard", "trackio", "wandb"]
    with pytest.raises(ConfigError, match=r"'x'.*mlflow"):
        check_trackers(["x"])
    with pytest.raises(ConfigError, match="x, x"):
        check_trackers(["x", "x"])
    monkeypatch.setattr("palestra.tracking.registry.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install mlflow-skinny"):
        check_trackers(["mlflow"])


async def test_a_tracker_without_its_library_is_one_line(tmp_path, monkeypatch, capsys):
    await record(tmp_path)
    monkeypatch.setattr("palestra.tracking.registry.find_spec", lambda name: None)
    assert main(["track", str(tmp_path), "wandb"]) == 2
    assert (
        capsys.readouterr().err == "palestra: tracking: wandb needs wandb, which is not installed: pip install wandb\n"
    )


async def test_a_plug_in_of_another_package_is_found_by_its_name(tmp_path, monkeypatch):
    await record(tmp_path)

    class Point:
        def load(self):
            return lambda run: (Kept(), run)

    monkeypatch.setattr("palestra.tracking.registry.extensions", lambda group: {"mine": Point()})
    run = tracked_run(tmp_path, "mine")
    assert known_trackers()[-1] == "mine"
    kept, given = create_tracker("mine", run)
    assert isinstance(kept, Kept)
    assert given == run


def test_what_is_tracked_does_not_decide_whether_a_run_can_be_resumed():
    plain, tracked = parse_config({}), parse_config({"tracking": ["tensorboard"]})
    assert plain.digest() == tracked.digest()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise OSError(28, 'No space left on device')", "No space left on device"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import time; time.sleep(600)", "was killed by SIGKILL"),
        (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
            "was killed by SIGKILL",
        ),
    ],
)
async def test_a_process_that_raises_dies_or_hangs_costs_the_job_nothing(tmp_path, monkeypatch, caplog, code, said):
    """In place of the real process; the block of the job is left a moment after the job ends."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    monkeypatch.setattr("palestra.tracking.process.LINGER_SECONDS", 0.3)
    caplog.set_level(logging.WARNING, "palestra")
    async with tracking(tmp_path, ["tensorboard"]):
        began = time.monotonic()
        assert time.monotonic() - began < 0.1
    assert time.monotonic() - began < 5.0
    assert said in caplog.text


async def test_a_process_that_writes_without_an_end_is_ended_before_it_fills_the_disk(tmp_path, monkeypatch, caplog):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nwhile true; do echo yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; done\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    monkeypatch.setattr("palestra.tracking.process.DISK_SECONDS", 0.02)
    monkeypatch.setattr("palestra.tracking.process.MOST_SAID", 2**12)
    caplog.set_level(logging.WARNING, "palestra")
    async with tracking(tmp_path, ["tensorboard"]):
        async with asyncio.timeout(5.0):
            while "was ended: it wrote more than" not in caplog.text:
                await asyncio.sleep(0.01)
    assert (
        tmp_path / "tracking" / "tensorboard.log"
    ).stat().st_size < 2**28  # seconds of writing, on a machine that is busy


async def test_what_a_tracker_has_started_ends_with_it(tmp_path, monkeypatch):
    script, pid = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {pid}.new; mv {pid}.new {pid}\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    async with tracking(tmp_path, ["tensorboard"]):
        async with asyncio.timeout(5.0):
            while not pid.exists():
                await asyncio.sleep(0.01)
    state = Path("/proc", pid.read_text().strip(), "status")
    async with asyncio.timeout(5.0):
        while state.exists() and "zombie" not in state.read_text():  # its new parent may not have taken its end
            await asyncio.sleep(0.01)


FORKS = """
import subprocess

class Forks:
    def __init__(self, run):
        child = subprocess.Popen(["sleep", "600"])
        (run.folder / "new").write_text(str(child.pid))
        (run.folder / "new").rename(run.folder / "pid")
    def begin(self): pass
    def write(self, step, values, at): pass
    def flush(self): pass
    def close(self, completed): pass
"""


@pytest.mark.slow
async def test_what_a_tracker_has_started_ends_with_a_job_that_is_killed(tmp_path):
    """A killed job leaves the other end of the socket closed."""
    await record(tmp_path)
    (tmp_path / "path" / "forks-1.dist-info").mkdir(parents=True)
    (tmp_path / "path" / "forks-1.dist-info" / "METADATA").write_text("Name: forks\nVersion: 1\n")
    entry = "[palestra.trackers]\nforks = forks:Forks\n"
    (tmp_path / "path" / "forks-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "path" / "forks.py").write_text(FORKS)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")])}
    words = (str(tmp_path), "forks")
    process = await start_process("palestra.tracking.process", variables, *words, log=tmp_path / "log.txt")
    pid = tmp_path / "tracking" / "forks" / "pid"
    async with asyncio.timeout(30.0):
        while not pid.exists():
            await asyncio.sleep(0.05)
        process.connection.close()
        assert await process.code() == 0
        state = Path("/proc", pid.read_text(), "status")
        while state.exists() and "zombie" not in state.read_text():
            await asyncio.sleep(0.01)


async def test_a_process_that_can_not_be_started_costs_the_job_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    async with tracking(tmp_path, ["tensorboard", "wandb"]):
        pass
    assert caplog.text.count("could not be started") == 2
