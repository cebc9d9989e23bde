"""What a job takes includes the processes that it has started, and those that these have started."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from palestra.process.keeper import descendants_of
from palestra_inspect import trial
from palestra_inspect.trial import MemoryPeak

MIB = 2**20
GRANDCHILD = "held = bytearray(b'x' * (96 * 2**20)); print('ready', flush=True); input()"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"


def test_memory_of_descendants_counts_also_where_they_lead_a_session_of_their_own(monkeypatch):
    there = descendants_of(os.getpid())  # of other tests
    monkeypatch.setattr(trial, "descendants_of", lambda process: descendants_of(process) - there)
    with MemoryPeak() as memory:
        before = memory.now()
        with subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as child:
            assert child.stdout.readline() == b"ready\n"
            assert len([one for one in descendants_of(os.getpid()) if one >= child.pid]) >= 2
            until = time.monotonic() + 20
            while memory.others < 96 * MIB and time.monotonic() < until:
                time.sleep(0.05)
            child.communicate(b"\n")
    assert 96 * MIB <= memory.others < 300 * MIB
    assert before > 0
    assert descendants_of(2**30) == set()
