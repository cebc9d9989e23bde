"""Keeping the heap: large temporaries of arithmetic are not given back to the system and faulted in again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_heap() -> bool:
    """Tell glibc's malloc to keep freed memory and to take large blocks from the heap. False where it is not glibc.

    Page faults on large temporaries take a third of a training step otherwise (docs/benchmarks.md).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
