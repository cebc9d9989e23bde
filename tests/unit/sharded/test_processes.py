"""The process of a rank ends with the job, and the errors of a rank reach it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palestra.process.channel import Beat, BlockingChannel
from palestra_sharded.processes import FOLDER


@pytest.mark.slow
def test_a_rank_says_that_it_lives_and_ends_with_the_job_whose_folder_it_removes(tmp_path):
    own, theirs = socket.socketpair()
    folder = tmp_path / "ranks"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "palestra_sharded.processes", str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        env={**os.environ, FOLDER: str(folder)},
    )
    try:
        theirs.close()
        own.settimeout(60)
        assert next(BlockingChannel(own).messages()) == Beat()
        process.send_signal(signal.SIGTERM)  # as a service sends it to all processes of a job, which then saves
        assert next(BlockingChannel(own).messages()) == Beat()
        own.close()  # as the kernel does when the job's process is killed
        assert process.wait(timeout=60) == 1
        assert not folder.exists()
    finally:
        process.kill()


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_ended_by_another_one_when_the_job_is_gone(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / f"process-{os.getpid()}").touch()  # an id that another program has by now
    ranks, ends = [], []
    try:
        for _ in range(2):
            own, theirs = socket.socketpair()
            words = [sys.executable, "-m", "palestra_sharded.processes", str(theirs.fileno())]
            ranks.append(subprocess.Popen(words, pass_fds=(theirs.fileno(),), env={**os.environ, FOLDER: str(folder)}))
            theirs.close()
            own.settimeout(60)
            assert next(BlockingChannel(own).messages()) == Beat()
            ends.append(own)
        ranks[1].send_signal(signal.SIGSTOP)
        for own in ends:
            own.close()
        assert ranks[0].wait(timeout=60) == 1
        assert ranks[1].wait(timeout=60) == -signal.SIGKILL
        assert not folder.exists()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


JOB = """
import os, socket, subprocess, sys, time
own, theirs = socket.socketpair()
words = [sys.executable, "-m", "palestra_sharded.processes", str(theirs.fileno())]
print(subprocess.Popen(words, pass_fds=(theirs.fileno(),), stdout=subprocess.DEVNULL).pid, flush=True)
theirs.close()
time.sleep(60)
"""


@pytest.mark.slow
def test_a_rank_ends_when_the_job_is_killed(tmp_path):
    environment = {**os.environ, FOLDER: str(tmp_path)}
    job = subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE, env=environment)
    rank = int(job.stdout.readline())
    job.kill()
    job.wait()
    job.stdout.close()
    until = time.monotonic() + 30.0
    while Path(f"/proc/{rank}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{rank}").exists()
