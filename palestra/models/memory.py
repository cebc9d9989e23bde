"""How much memory there is, and how freed memory is kept for the next large temporary of arithmetic."""

from __future__ import annotations

import ctypes
import os
import sys

MEMORY_VARIABLE = "PALESTRA_MEMORY_GIB"  # set for the job of a service, which is ended when it uses more
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


def tune_malloc() -> bool:
    """Tell glibc's malloc to keep freed memory, in one heap for all threads started later. False where it can't be.

    Page faults on large temporaries take a third of a training step otherwise (docs/benchmarks.md).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return all(mallopt(*setting) for setting in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)))


def memory_bytes() -> int:
    """Return the memory that this process may use: `PALESTRA_MEMORY_GIB`, or all that the machine has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = os.environ.get(MEMORY_VARIABLE)
    return machine if given is None else min(machine, int(float(given) * 2**30))
