"""Starts a command that trains again, with settings of malloc that only the start of a process can make."""

from __future__ import annotations

import os
import sys

from palestra.process.child import MALLOC_VARIABLE, NO_CACHES, malloc_without_caches
from palestra.terminal import say

_STARTED = "PALESTRA_STARTED_AGAIN"  # the number of the process, which stays the same


def start_without_caches() -> None:
    """Start this process again in its own place, with the same number and arguments, unless that was done already.

    Why is in `malloc_without_caches`. Only a process that was started for a command may call it, and before all else. A
    debugger keeps its process, and other C libraries than glibc have no such caches. Processes that this one starts get
    the environment that it was given.
    """
    given = os.environ.get(MALLOC_VARIABLE, "")
    if os.environ.pop(_STARTED, None) == str(os.getpid()):
        _restore(given)
        return
    wanted = malloc_without_caches(given)
    if wanted == given or not sys.executable or sys.gettrace() is not None or not _has_glibc():
        return
    changed = {MALLOC_VARIABLE: wanted, _STARTED: str(os.getpid())}
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | changed)
    except OSError as error:
        say(f"palestra: can't start again without malloc's caches, and need more memory: {error}", file=sys.stderr)


def _restore(given: str) -> None:
    """Give the environment the tunables that it had before this process was started again."""
    before = given.removesuffix(NO_CACHES).removesuffix(":")
    if before:
        os.environ[MALLOC_VARIABLE] = before
    else:
        os.environ.pop(MALLOC_VARIABLE, None)


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError, AttributeError):
        return False
