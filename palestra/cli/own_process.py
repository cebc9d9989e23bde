"""The process of a command: started again with settings of malloc, and its end, which nothing holds up."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
import time

from palestra.terminal import say

EXIT_SECONDS = 4.0  # for the process to end by itself when its work is done
log = logging.getLogger("palestra")
_own = threading.Event()  # set in a process that was started for one command
_STARTED = "PALESTRA_STARTED_AGAIN"  # the number of the process, which stays the same


def own_process() -> None:
    """Mark this process as one that ends with the command."""
    _own.set()
    atexit.register(gc.freeze)  # else the interpreter examines all objects when it ends: two seconds with torch


def end_soon(code: int = 1) -> None:
    """End the process if it still runs after `EXIT_SECONDS`; no effect in other processes.

    Commands call this when their work is done. Otherwise a task that cannot be cancelled, or a thread that does not
    return, would keep the process alive.

    Args:
        code: exit code.
    """
    if _own.is_set():
        threading.Thread(target=_end, args=(code,), name="palestra-exit", daemon=True).start()


def _end(code: int) -> None:
    time.sleep(EXIT_SECONDS)
    log.error("a part of the process has not ended within %g s; it is left behind", EXIT_SECONDS)
    os._exit(code)


def start_without_caches() -> None:
    """Re-execute this process with the same pid and arguments, unless that was done already.

    See `malloc_without_caches` for the reason. Only call this first, in a process that was started for a command. A
    process under a debugger continues unchanged, and so does one with another C library than glibc. Child processes get
    the original environment.
    """
    from palestra.process.child import MALLOC_VARIABLE, malloc_without_caches

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
    """Restore the tunables in the environment to those before the restart."""
    from palestra.process.child import MALLOC_VARIABLE, NO_CACHES

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
