"""Ends a job whose processes use more memory than allowed. A process of its own, so that no job can block it.

A script that needs the standard library only (`python -I -S memory_watch.py …`): it costs about 10 MiB per job, and
must not need memory or imports when memory is short. Counted is memory that the kernel can't take back: anonymous and
shared memory, also if it is swapped out, but neither reserved address space nor pages of files. Memory that a process
shares with its children is counted once: each has its proportional share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

LOOK_SECONDS = 0.25
LOOKS_A_SCAN = 4  # children are searched for at every fourth look
USED = "@USED@"  # placeholder in the text of the ending for the GiB in use
_WHOLE = ("RssAnon:", "RssShmem:", "VmSwap:")
_SHARE = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")


def used_bytes(pid: int, children: list[int], limit_bytes: int) -> int:
    """Return the memory of a process and its children, in bytes; a process that has ended uses none.

    Proportional shares are computed only if more than `limit_bytes` would be used without them, because the kernel
    walks through all pages for them.

    Args:
        limit_bytes: up to this sum, shared memory may be counted more than once.
    """
    total = sum(_sum(f"/proc/{process}/status", _WHOLE) for process in (pid, *children))
    if total <= limit_bytes or not children:
        return total
    return sum(_sum(f"/proc/{process}/smaps_rollup", _SHARE) for process in (pid, *children))


def descendants(*pids: int) -> list[int]:
    """Return the children of processes, their children, and so on, without these and without this process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = list(pids)
    for parent in found:  # the list grows during the loop
        found.extend(children.get(parent, ()))
    return [child for child in found if child not in (*pids, os.getpid())]


def start_time(pid: int) -> str | None:
    """Return when a process was started, in ticks of the kernel, or None if it has ended."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else fields[19]


def join(beside: Path) -> None:
    """Let the memory of this process count as that of a job, see `watch`.

    Args:
        beside: the job's folder for such processes, on this machine.
    """
    beside.mkdir(mode=0o700, parents=True, exist_ok=True)
    (beside / str(os.getpid())).write_text(start_time(os.getpid()) or "", encoding="utf-8")


def _joined(beside: Path | None) -> list[int]:
    """Return the processes that have joined and run; a number that now is another process's is none of them."""
    found = list[int]()
    with contextlib.suppress(OSError):
        for path in beside.iterdir() if beside is not None else ():
            if path.name.isdigit() and path.read_text(encoding="utf-8") == start_time(int(path.name)):
                found.append(int(path.name))
    return found


def watch(pid: int, limit_bytes: int, ended: Path, text: str, log: Path, beside: Path | None = None) -> bool:
    """Watch a process until it ends, or end it; returns whether it was ended.

    Args:
        limit_bytes: memory that the process and its children may use.
        ended: file that says how the job ended; written before the process is ended.
        text: content of `ended`, with the placeholder `USED` in it.
        log: the job's log, to which the text is added.
        beside: folder with the numbers of further processes of the job that count, and whose children do; None: there
            are none.
    """
    started, children, looks = start_time(pid), list[int](), 0
    while started is not None and start_time(pid) == started:
        if looks % LOOKS_A_SCAN == 0:  # not at every look: it reads all processes of the machine
            children = [*(joined := _joined(beside)), *descendants(pid, *joined)]
        looks += 1
        used = used_bytes(pid, children, limit_bytes)
        if used > limit_bytes:
            said = text.replace(USED, f"{used / 2**30:.2f}")
            temporary = ended.with_name(f".{ended.name}.part")
            with contextlib.suppress(OSError):  # a full disk must not keep the job alive
                with temporary.open(
                    "w", encoding="utf-8"
                ) as file:  # as `disk.write_whole` does, which this script can't import
                    file.write(said)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(ended)
                with log.open("a", encoding="utf-8") as file:
                    file.write(said + "\n")
            for process in (pid, *(joined := _joined(beside)), *descendants(pid, *joined)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return True
        time.sleep(LOOK_SECONDS)
    return False


def _stat(pid: int) -> list[str] | None:
    """Return the fields of `/proc/PID/stat` from the state on, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None


def _sum(path: str, names: tuple[str, ...]) -> int:
    """Return the sum, in bytes, of the lines of a file in /proc that begin with one of `names`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], *map(Path, sys.argv[5:]))
