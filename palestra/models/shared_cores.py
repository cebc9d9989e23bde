"""Chooses the number of threads when other processes use the cores too.

Threads of one product wait for the slowest of them. On two cores with one busy process, two threads therefore take
longer than one (docs/benchmarks.md).

Every thread that computes in parallel gets a pool of OpenMP's threads, until it ends. GNU's OpenMP, used by torch's
Linux builds, lets them spin between operations. But once all pools of a process are larger than the machine, they sleep
after a microsecond, and a pass of a small model takes nearly twice as long (docs/benchmarks.md). So a thread that
computes only now and then releases its pool in between.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from palestra.models.device import available_cores

_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # columns of a processor's line: idle, and waiting for a disk
_GUEST = 8  # from this column on the numbers are part of earlier ones


def set_threads(threads: int | None) -> None:
    """Set how many threads the calling thread's arithmetic uses; None: unchanged."""
    if threads is not None:
        torch.set_num_threads(threads)


class _Look(NamedTuple):
    at: float  # monotonic seconds
    busy: float  # processor seconds of all processes on the cores on which this one may run
    own: float  # processor seconds of this process


class SharedCores:
    """Chooses the number of threads for a piece of work by the cores that others used during the last one.

    Attributes:
        threads: None: torch's default.
    """

    def __init__(self, threads: int | None, fixed: bool) -> None:
        """Begin with all cores. `threads` is the user's setting; None: all cores that others leave. `fixed`: results
        depend on the number.
        """
        self.threads = threads
        self._adapts = threads is None and not fixed and _STAT.exists()
        self._most = min(torch.get_num_threads(), available_cores()) if self._adapts else 0
        self._before: _Look | None = None

    def begin(self) -> None:
        """Set the threads of the calling thread, which begins to compute."""
        set_threads(self.threads)
        if self._adapts and self._most > 1:
            self._before = _look()

    def note(self, least_seconds: float) -> None:
        """Choose the threads again if the work since `begin` took at least `least_seconds`."""
        if self._before is None or time.monotonic() - self._before.at < least_seconds:
            return
        now = _look()
        others = (now.busy - self._before.busy - (now.own - self._before.own)) / (now.at - self._before.at)
        self.threads = min(max(len(_cores()) - round(others), 1), self._most)
        self.begin()


def _cores() -> set[int]:
    """Return the cores on which this process may run, possibly more than `PALESTRA_CORES` allows."""
    return os.sched_getaffinity(0)


def _look() -> _Look:
    """Return the cumulative use of the cores."""
    cores = {f"cpu{number}" for number in _cores()}
    busy = 0
    for line in _STAT.read_text(encoding="ascii").splitlines():
        name, *numbers = line.split()
        if name in cores:
            busy += sum(int(n) for place, n in enumerate(numbers[:_GUEST]) if place not in _IDLE)
    own = os.times()
    return _Look(time.monotonic(), busy / _TICKS, own.user + own.system)


_SOFT = 1  # omp_pause_soft: settings such as the number of threads are kept


def release_threads() -> bool:
    """End the threads of the calling thread's pool; False: torch's OpenMP cannot.

    The next parallel operation starts them again, in about 0.2 ms.
    """
    if not sys.platform.startswith("linux"):
        return False
    # Torch makes the symbols of its libraries global. Version 5.0 of OpenMP has this function.
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return pause is not None and pause(_SOFT) == 0
