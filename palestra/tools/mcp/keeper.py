"""Runs a command in its own process group, and ends the group when the command or the starter ends.

This is a separate program, `python keeper.py DESCRIPTOR COMMAND …`, without imports of Palestra, so that it starts fast
and stays small. The descriptor is a pipe whose other end the starter holds: it is closed however the starter ends, even
by SIGKILL. The command has the keeper's standard input, output and error.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL


def main() -> int:
    """Run the command and return its exit code, or 128 + the signal that ended it."""
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    child = os.fork()
    if child == 0:
        _become(command, lifeline)
    with contextlib.suppress(OSError):  # the child does the same, and may have been first
        os.setpgid(child, child)
    for descriptor in (0, 1):  # the command's alone, so that it sees the end of its input, and we that of its output
        os.close(descriptor)
    status = _wait(child, lifeline, woken)
    _signal(child, signal.SIGKILL)  # what the command has left behind
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _become(command: list[str], lifeline: int) -> None:
    """Turn this process, a new one, into the command."""
    try:
        os.setpgid(0, 0)
        os.close(lifeline)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _wait(child: int, lifeline: int, woken: int) -> int:
    """Wait for the end of the command, and end it when the lifeline is closed; return its wait status."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        ready = select.select([lifeline, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 512)
        if lifeline in ready:
            return _end(child)


def _end(child: int) -> int:
    _signal(child, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    _signal(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group have ended
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
