"""OpenMP's threads, which compute torch's products on a CPU: how they wait, and when they end.

Every thread that computes in parallel gets a pool of such threads, until it ends. GNU's OpenMP, used by torch's Linux
builds, lets them spin between operations. But once all pools of a process are larger than the machine, they sleep after
a microsecond, and a pass of a small model takes nearly twice as long (docs/benchmarks.md). So a thread that computes
only now and then releases its pool in between.
"""

from __future__ import annotations

import ctypes
import sys

_SOFT = 1  # omp_pause_soft: settings such as the number of threads are kept


def release_threads() -> bool:
    """End the threads of the calling thread's pool; False: torch's OpenMP cannot, or torch is not loaded.

    The next parallel operation starts them again, in about 0.2 ms.
    """
    if not sys.platform.startswith("linux") or "torch" not in sys.modules:
        return False
    # Torch makes the symbols of its libraries global. Version 5.0 of OpenMP has this function.
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return pause is not None and pause(_SOFT) == 0
