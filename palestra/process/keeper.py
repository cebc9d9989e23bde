"""Start a command, and end it with all that it has started when it, or the owner, ends.

A program of its own, `python keeper.py DESCRIPTOR SECONDS [--remove FOLDER]… COMMAND …`, that leads a session. It
imports nothing of Palestra, so that it starts fast and stays small. The descriptor is a pipe whose other end the owner
keeps: it is closed however the owner ends, also by SIGKILL. SIGTERM, SIGHUP and SIGINT do the same as its end, and
SIGQUIT gives the command no time. The command has the keeper's standard input, output and error, and SECONDS from
SIGTERM to SIGKILL. The folders are removed at the end: sockets, and weights in shared memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
LAST_SECONDS = 3.0  # for what is left when the command has ended: Python's process that removes shared memory, say
_LOOK_SECONDS = 0.02
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # the command, if its keeper gets it


def _main() -> int:
    """Run the command and return its exit code, or 128 + the signal that ended it."""
    lifeline, seconds, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    folders = []
    while command[0] == "--remove":
        folders.append(command[1])
        command = command[2:]
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # nohup ignores SIGHUP, and a shell's background jobs SIGINT; SIGQUIT they ignore too, but the owner sends it.
    caught = [one for one in _ENDS if one == signal.SIGQUIT or signal.getsignal(one) != signal.SIG_IGN]
    for number in (signal.SIGCHLD, *caught):
        signal.signal(number, lambda number, frame: None)
    _ask_kernel(_ADOPT_ORPHANS, 1)  # so that what leaves the session stays below this process
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        _become(command, lifeline, caught, keeper)
    with contextlib.suppress(OSError):  # the child does the same, and may have been first
        os.setpgid(child, child)
    for descriptor in (0, 1):  # the command's alone, so that it sees the end of its input, and its reader its end
        os.close(descriptor)
    ended, status, numbers = 0, 0, b""
    while not (ended or set(caught) & set(numbers)) and lifeline not in select.select([lifeline, woken], [], [])[0]:
        numbers = os.read(woken, 512)
        ended, status = _reaped(child)
    _signal(child, signal.SIGTERM)
    seconds = 0.0 if signal.SIGQUIT in numbers else min(seconds, LAST_SECONDS) if ended else seconds
    until = time.monotonic() + seconds
    while (not ended or _others()) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        if not ended:
            ended, status = _reaped(child)
    _signal(child, signal.SIGKILL)
    if not ended:
        status = os.waitpid(child, 0)[1]
    _kill_others()
    for folder in folders:
        remove_tree(folder)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _become(command: list[str], lifeline: int, caught: list[signal.Signals], keeper: int) -> None:
    """Turn this process, a new one, into the command."""
    try:
        _ask_kernel(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != keeper:  # it was killed before
            return
        os.setpgid(0, 0)
        os.close(lifeline)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *caught):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group have ended
        os.killpg(group, number)


def _ask_kernel(option: int, value: int) -> None:
    """Call prctl(2), where there is such a thing."""
    if sys.platform == "linux":
        import ctypes  # here, because `members_of` is used without it

        ctypes.CDLL(None).prctl(option, value)


def _kill_others() -> None:
    """Kill those that have left the group, with what they start meanwhile, and see their end."""
    until = time.monotonic() + LAST_SECONDS
    while (others := _others()) and time.monotonic() < until:
        for process in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def _reaped(child: int) -> tuple[int, int]:
    """Reap orphans that have ended; return the command and its status once it has ended, else zeros."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0, 0
        if process in (0, child):
            return process, status


def _others() -> list[int]:
    """Return the running processes of this session, and those below this process in other sessions."""
    own, running = os.getpid(), _running()
    below = _below(own, running)
    return [process for process, _, session in running if process != own and (process in below or session == own)]


def remove_tree(path: str) -> bool:
    """Remove a file or a folder that a program has left, however deep and closed; return whether nothing is left.

    Folders are moved to the top one, so that no path becomes too long, and nothing recurs.
    """
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return not os.path.lexists(path)
    below, moved, mark = [path], 0, os.urandom(8).hex()
    while below:
        folder = below.pop()
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
            for entry in list(os.scandir(folder)):
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    place = entry.path
                    if folder != path:
                        place, moved = os.path.join(path, f"{mark}-{moved}"), moved + 1
                        os.chmod(entry.path, 0o700)  # a folder is only moved by who may write to it
                        os.rename(entry.path, place)
                    below.append(place)
        if folder != path:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.lexists(path)


def descendants_of(process: int) -> set[int]:
    """Return the running processes below a process, in any session; none where the system does not tell."""
    return _below(process, _running())


def _below(process: int, running: list[tuple[int, int, int]]) -> set[int]:
    below, found = {process}, set[int]()
    while below:
        below = {one for one, parent, _ in running if parent in below} - found
        found |= below
    return found


def members_of(session: int) -> list[int]:
    """Return the processes of a session that run; none where the system does not tell."""
    return [process for process, _, own in _running() if own == session]


def kill_session(session: int, but: int = 0) -> None:
    """Kill the processes of a session but one, also those that stand still."""
    for process in members_of(session):
        with contextlib.suppress(ProcessLookupError):
            if process != but:
                os.kill(process, signal.SIGKILL)


def process_start(process: int) -> int:
    """Return when a process started, in the kernel's ticks since its boot; 0: no such process runs."""
    fields = _stat(process)
    return int(fields[19]) if fields else 0


def _running() -> list[tuple[int, int, int]]:
    """Return the id, the parent and the session of each process that has not ended."""
    processes = map(int, filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()))
    return [(one, int(fields[1]), int(fields[3])) for one in processes if (fields := _stat(one))]


def _stat(process: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on; none: the process has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


if __name__ == "__main__":
    sys.exit(_main())
