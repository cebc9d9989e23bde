"""Keeping the heap: large temporaries of arithmetic are not given back to the system and faulted in again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


def keep_heap() -> bool:
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
