"""The watcher on real processes that eat memory, with nothing of the job's own cooperation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palestra.process.keeper import descendants_of
from palestra_service.jobs.launcher import ENDED_FILE, Ended, Ending, ended_text, read_ended
from palestra_service.ray.memory_watch import USED, used_bytes, watching

MIB = 2**20
TEXT = ended_text(Ended(ending=Ending.FAILED, reason=f"it had {USED} GiB"))
EAT = "import time; kept = b'x' * ({} << 20); print(1, flush=True); time.sleep(120)"
# One call into C that never lets another thread run: neither an event loop nor a thread of the process would notice.
BLOCKED = "import sys; print(1, flush=True); b'x' * (60 << 20); kept = [0] * (50 << 20); [0] * (8 << 30)"
FORKED = (
    "import os, time; kept = b'x' * ({} << 20)\n"
    "for _ in range(3):\n    if os.fork() == 0: break\n"
    "os.write(1, b'1\\n'); time.sleep(120)"  # each of the four writes its line whole
)
CHILD = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
    "print(1, flush=True); time.sleep(120)"
)
RESERVED = "import mmap, time; kept = mmap.mmap(-1, 4 << 30); print(1, flush=True); time.sleep(120)"


@pytest.fixture
def start():
    processes = []

    def started(*words: str) -> subprocess.Popen:
        processes.append(subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE))
        assert processes[-1].stdout.readline() == b"1\n"
        return processes[-1]

    yield started
    for process in processes:
        for child in descendants_of(process.pid):
            os.kill(child, 9)
        process.kill()
        process.wait()
        process.stdout.close()


def watcher(process: subprocess.Popen, folder: Path, limit_mib: int) -> subprocess.Popen:
    return subprocess.Popen(watching(process.pid, limit_mib * MIB, folder / ENDED_FILE, TEXT, folder / "log.txt"))


@pytest.mark.parametrize("words", [(EAT.format(100),), (BLOCKED,), (CHILD, EAT.format(100)), (FORKED.format(100),)])
def test_a_process_over_its_memory_is_ended_with_its_children_and_the_reason(start, tmp_path, words):
    process = start(*words)
    other = watcher(process, tmp_path, 60)
    assert process.wait(30) == -9
    assert other.wait(30) == 0
    ended = read_ended(tmp_path)
    assert ended is not None
    assert ended.ending is Ending.FAILED
    had = float(ended.reason.removeprefix("it had ").removesuffix(" GiB"))
    assert had >= 60 / 1024
    assert ended.reason in (tmp_path / "log.txt").read_text()
    assert not descendants_of(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(RESERVED,), (EAT.format(20),), (FORKED.format(40),)],
)
def test_one_below_it_goes_on_whatever_it_has_reserved_or_shares(start, tmp_path, words):
    process = start(*words)
    other = watcher(process, tmp_path, 75)
    time.sleep(1.5)  # several looks
    assert process.poll() is other.poll() is None
    process.kill()
    process.wait()
    assert other.wait(30) == 0
    assert not (tmp_path / ENDED_FILE).exists()


def test_what_is_shared_by_a_fork_is_counted_once(start):
    process = start(FORKED.format(200))
    deadline = time.monotonic() + 30
    while len(children := descendants_of(process.pid)) < 3:
        assert time.monotonic() < deadline, children
    assert used_bytes(process.pid, children, 1000 * MIB) > 800 * MIB  # four processes that each show 200 MiB
    assert 200 * MIB <= used_bytes(process.pid, children, 300 * MIB) < 240 * MIB
