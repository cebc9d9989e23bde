"""OpenMP's threads, which compute the products of torch on a CPU: how they wait for one another, and when they end.

Every thread that computes in parallel gets a pool of such threads, which stays until the thread ends. GNU's OpenMP,
which torch's builds for Linux use, lets the threads of a pool spin between two operations. But as soon as all pools of
a process together are larger than the machine, it lets them sleep after a microsecond, and a pass of a small model
takes nearly twice as long (docs/benchmarks.md). So a thread that computes now and then gives its pool back in between.
"""

from __future__ import annotations

import ctypes
import sys

_SOFT = 1  # omp_pause_soft: settings such as the number of threads are kept


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
