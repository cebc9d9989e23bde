"""Find out how much memory there is, and keep freed memory for the next large temporary of arithmetic."""

from __future__ import annotations

import ctypes
import os
import sys

MEMORY_VARIABLE = "PALESTRA_MEMORY_GIB"  # set by the control plane, which ends a job that uses more
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


def tune_malloc() -> bool:
    """Make glibc's malloc keep freed memory, in one heap for all threads started later.

    Otherwise page faults on large temporaries take a third of a training step (docs/benchmarks.md).

    Returns:
        False if the C library has no such settings.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return all(mallopt(*setting) for setting in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)))


def memory_bytes() -> int:
    """Return how many bytes of memory this process may use: `PALESTRA_MEMORY_GIB`, or all that the machine has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = os.environ.get(MEMORY_VARIABLE)
    return machine if given is None else min(machine, int(float(given) * 2**30))
