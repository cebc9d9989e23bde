"""glibc's caches of small freed blocks, which only the start of a process can switch off.

torch asks malloc for memory that begins at a multiple of 64 bytes, for which glibc cuts a little off both ends of a
block. A cut in such a cache is handed out again, for as long as a pass lives, and then the block cannot grow together
with its neighbours when it is freed: a training step needs 150 to 300 MB more, for nothing.
"""

from __future__ import annotations

import os
import sys

_TUNABLES, _NO_CACHES = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
_STARTED = "PALESTRA_STARTED_AGAIN"  # the number of the process, which stays the same


def start_without_caches() -> None:
    """Start this process again in its own place, with the same number and arguments, unless that was done already.

    Other C libraries than glibc have no such caches, and who has set them is not overruled. Processes that this one
    starts get the environment that it was given.
    """
    given = os.environ.get(_TUNABLES, "")
    if os.environ.pop(_STARTED, None) == str(os.getpid()):
        _restore(given)
        return
    if "tcache_count" in given or not sys.executable or not _has_glibc():
        return
    changed = {_TUNABLES: f"{given}:{_NO_CACHES}" if given else _NO_CACHES, _STARTED: str(os.getpid())}
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | changed)
    except OSError:
        return  # the process needs more memory, and that is all


def _restore(given: str) -> None:
    """Give the environment the tunables that it had before this process was started again."""
    before = given.removesuffix(_NO_CACHES).removesuffix(":")
    if before:
        os.environ[_TUNABLES] = before
    else:
        os.environ.pop(_TUNABLES, None)


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError, AttributeError):
        return False
