"""Ends a command's process even if a task or thread of a user's environment does not end."""

from __future__ import annotations

import logging
import os
import threading
import time

EXIT_SECONDS = 4.0  # for the process to end by itself when its work is done
log = logging.getLogger("palestra")
_own = threading.Event()  # set in a process that was started for one command


def own_process() -> None:
    """Mark this process as one that ends with the command."""
    _own.set()


def end_soon() -> None:
    """End the process with code 1 if it still runs after `EXIT_SECONDS`; no effect in other processes.

    Commands call this when their work is done. Otherwise a task that can't be cancelled, or a thread that does not
    return, would keep the process alive.
    """
    if _own.is_set():
        threading.Thread(target=_end, name="palestra-exit", daemon=True).start()


def _end() -> None:
    time.sleep(EXIT_SECONDS)
    log.error("a part of the process has not ended within %g s; it is left behind", EXIT_SECONDS)
    os._exit(1)
