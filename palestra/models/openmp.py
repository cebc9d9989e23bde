"""OpenMP's threads, which compute the products of torch on a CPU: how they wait for one another, and when they end.

Every thread that computes in parallel gets a pool of such threads, which stays until the thread ends. GNU's OpenMP,
which torch's builds for Linux use, lets the threads of a pool spin between two operations. But as soon as all pools of
a process together are larger than the machine, it lets them sleep after a microsecond, and a pass of a small model
takes nearly twice as long (docs/benchmarks.md). So a thread that computes now and then gives its pool back in between.
"""

from __future__ import annotations

import ctypes
import os
import sys

SPIN_VARIABLE = "GOMP_SPINCOUNT"
# Rounds of about 10 ns. By default a thread spins for 300,000, several milliseconds, while the one that it waits for
# may need its core: beside one busy process a training step took many times as long. The gaps between two operations of
# a pass are far shorter than these rounds, so that a quiet machine notices nothing.
SPINS = 30_000
_SOFT = 1  # omp_pause_soft: settings such as the number of threads are kept


def limit_spinning() -> None:
    """Let OpenMP's threads spin for less long than by default, unless the user has chosen how long.

    It has to be called before torch is loaded; later it changes nothing. Child processes inherit the setting.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, str(SPINS))


def release_threads() -> bool:
    """End the threads of the calling thread's pool; its next parallel operation starts them again, in about 0.2 ms.

    Returns:
        False if torch's OpenMP can't do that, or torch is not loaded.
    """
    if not sys.platform.startswith("linux") or "torch" not in sys.modules:
        return False
    # Torch makes the symbols of its libraries global. Version 5.0 of OpenMP has this function.
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return pause is not None and pause(_SOFT) == 0
