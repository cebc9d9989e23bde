from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest


def run(code: str, **environment: str) -> str:
    """Return what a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True, env={**environment}
    )
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
def test_released_threads_are_gone_and_come_back():
    """A thread that computes has a pool, which ends when it is given back and starts with the next operation."""
    found = run(
        """
        import os
        from palestra.models.shared_cores import release_threads
        import torch
        torch.set_num_threads(4)
        big = torch.ones(2_000_000)
        def threads():
            return len(os.listdir("/proc/self/task"))
        release_threads()
        before = threads()
        big.exp()
        during = threads()
        assert release_threads()
        after = threads()
        assert torch.get_num_threads() == 4
        big.exp()
        print(during - before, after - before, threads() - before)
        """
    )
    assert found == "3 0 3"
