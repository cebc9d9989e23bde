"""What a job takes includes the processes that it has started, and those that these have started."""

from __future__ import annotations

import os
import subprocess
import sys

from palestra.process.keeper import descendants_of
from palestra_inspect import trial

MIB = 2**20
GRANDCHILD = "held = bytearray(b'x' * (96 * 2**20)); print('ready', flush=True); input()"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"


def test_memory_of_descendants_counts_also_where_they_lead_a_session_of_their_own(monkeypatch):
    there = descendants_of(os.getpid())  # of other tests
    monkeypatch.setattr(trial, "descendants_of", lambda process: descendants_of(process) - there)
    before = trial.peak_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout.readline() == b"ready\n"
        assert len([one for one in descendants_of(os.getpid()) if one >= child.pid]) >= 2
        during = trial.peak_bytes()
        child.communicate(b"\n")
    assert 96 * MIB <= during - before < 300 * MIB
    assert 0 < before <= trial.peak_bytes() < during
    assert descendants_of(2**30) == set()
