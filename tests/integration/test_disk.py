"""Disks that are full or read-only, and stores that are damaged or gone: one line, exit code 2, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from disks import read_only, small_disk
from outcome import assert_complete, assert_same_metrics
from servers import HERE, PALESTRA, SCRIPTED, Job, environment, until

from palestra.errors import CheckpointError
from palestra.trainer import checkpoint

PATIENT = SCRIPTED | {"rollout": {**SCRIPTED["rollout"], "lease_seconds": 1.0, "max_attempts": 9}}


def said(*words: object) -> str:
    """What a command says that ends with code 2 and one line."""
    ran = subprocess.run(
        [PALESTRA, *map(str, words)], capture_output=True, text=True, check=False, env=environment(), timeout=60
    )
    return one_line(ran.returncode, ran.stderr)


def delete(folder: Path) -> None:
    """Delete a folder in which a server may still make files, as often as it takes."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def one_line(code: int, output: str) -> str:
    assert code == 2, output
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("palestra: ")
    return last


def copy_of(job: Job, folder: Path) -> Job:
    """The run of a finished job in another folder."""
    copied = Job(folder, job.settings)
    shutil.copytree(job.run_dir, copied.run_dir)
    return copied


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_row_of_metrics(tmp_path, undisturbed):
    with Job(tmp_path, PATIENT) as job:
        server = job.start()
        job.work("--threads", "1", "--stop-after", "chat", "--stop-in", "train-000002")
        until(lambda: job.worker_log("stops"), "the worker is in the middle of step 2")
        rows = job.run_dir / "metrics.jsonl"
        rows.unlink()
        rows.symlink_to("/dev/full")
        job.workers[-1].send(signal.SIGCONT)
        line = one_line(server.wait(), server.output)
        assert "metrics.jsonl could not be written: No space left on device" in line
        assert "--resume" in line
        rows.unlink()
        job.start("--resume")
        job.work()  # the first worker has heard that the job was over
        job.finish()
        assert_complete(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


def test_a_disk_that_is_full_when_a_real_model_is_saved(tmp_path):
    """Safetensors does not raise an OSError."""

    def fill(folder: Path) -> None:
        safetensors.torch.save_file({"weights": torch.zeros(10**6)}, folder / "model.safetensors")

    with (
        small_disk(tmp_path / "small", "1m") as folder,
        pytest.raises(CheckpointError, match=r"1.*space") as caught,
    ):
        checkpoint.write(folder, 1, fill, {}, 2)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.slow
def test_a_folder_that_is_read_only(tmp_path, undisturbed):
    copied = copy_of(undisturbed, tmp_path / "job")
    with read_only(tmp_path / "job" / "run"):
        assert "Read-only file system" in said("run", copied.config_file, "--resume", "--set", "steps=4")
        new = copied.run_dir / "new"
        assert "Read-only file system" in said("run", copied.config_file, "--set", f"run_dir={json.dumps(str(new))}")
        agent = tmp_path / "agent.py"
        agent.write_text("def rollout(task, policy):\n    return 1.0\n")
        words = ("train", f"{agent}:rollout", "--config", copied.config_file, "--resume", "--set", "steps=4")
        assert "Read-only file system" in said(*words)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "no database":
        path.write_bytes(b"hello\n")
    elif how == "cut in half":
        path.write_bytes(content[: len(content) // 2])
    else:
        with path.open("r+b") as file:  # as `dd conv=notrunc` does
            file.seek(100)
            file.write(bytes(20_000))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no database", "cut in half", "overwritten"])
def test_a_store_that_is_damaged(tmp_path, undisturbed, how):
    copied = copy_of(undisturbed, tmp_path)
    damage(copied.run_dir / "run.db", how)
    for words in (("run", copied.config_file, "--resume", "--set", "steps=4"), ("episodes", copied.run_dir)):
        line = said(*words)
        assert "run.db" in line
        assert "not a run store, or is damaged" in line
    assert subprocess.run([PALESTRA, "export", copied.run_dir, tmp_path / "model"], check=False).returncode == 0


def acknowledged(job: Job) -> set[str]:
    return {entry["episode"] for entry in job.worker_log("ended")}


def completed(path: Path) -> set[str]:
    with sqlite3.connect(path) as db:
        return {name for (name,) in db.execute("SELECT episode_id FROM episodes WHERE state = 'completed'")}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replaced", "moved", "deleted", "log deleted"])
def test_a_store_that_is_gone_while_it_is_used_acknowledges_nothing_more(tmp_path, how):
    with Job(tmp_path, PATIENT | {"steps": 500, "evaluation": {"every_steps": 0}}) as job:
        server = job.start()
        job.work("--threads", "4")
        until(lambda: len(acknowledged(job)) >= 20, "episodes are played")
        server.send(signal.SIGSTOP)
        process = psutil.Process(server.popen.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED, "it stands still")
        kept = tmp_path / "kept"
        kept.mkdir()
        for name in ("run.db", "run.db-wal"):
            (kept / name).hardlink_to(job.run_dir / name)  # what was written is still there under another name
        if how == "moved":
            job.run_dir.rename(tmp_path / "moved")
        elif how == "deleted":
            delete(job.run_dir)
        elif how == "replaced":
            shutil.copyfile(job.run_dir / "run.db", tmp_path / "copy.db")
            (tmp_path / "copy.db").rename(job.run_dir / "run.db")
        else:
            (job.run_dir / "run.db-wal").unlink()
        before = acknowledged(job)
        server.send(signal.SIGCONT)
        line = one_line(server.wait(), server.output)
        assert "was deleted, moved or replaced" in line
        assert len(acknowledged(job) - before) <= 4  # answers that were on their way to a thread of the worker each
        assert acknowledged(job) <= completed(kept / "run.db")


@pytest.mark.slow
def test_a_store_that_is_deleted_while_nobody_calls_is_noticed_too(tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        server = job.start()
        delete(job.run_dir)
        assert "was deleted, moved or replaced" in one_line(server.wait(), server.output)


@pytest.mark.slow
def test_a_script_hears_of_a_full_disk_as_an_error_of_palestra(tmp_path):
    code = (
        "import palestra, sys\n"
        f"sys.argv = ['script', {str(tmp_path / 'run')!r}, 'train', 'plain', 'none']\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import stoppable_script as script\n"
        "from pathlib import Path\n"
        "def rollout(task, policy):\n"
        "    rows = Path(script.FOLDER) / 'metrics.jsonl'\n"
        "    rows.unlink(missing_ok=True)\n"
        "    rows.symlink_to('/dev/full')\n"
        "    return 1.0\n"
        "try:\n"
        "    palestra.train(rollout, script.TASKS, script.config(), concurrency=1, quiet=True)\n"
        "except palestra.errors.StoreError as error:\n"
        "    print('HEARD', error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment(), timeout=60
    )
    assert "HEARD" in ran.stdout, ran.stderr
    assert "No space left on device" in ran.stdout
