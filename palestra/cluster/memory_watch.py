"""Ends a job whose processes use more memory than it may. A process of its own, so that no job can hold it up.

A script of the standard library alone (`python -I -S memory_watch.py …`): it costs about 10 MiB a job, and it must not
need memory or imports when memory is short. Counted is what the kernel can't take back: anonymous and shared memory,
also where it is swapped out; neither address space that was only reserved, nor pages of files. What a process has in
common with its children is counted once: each has its proportional share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

LOOK_SECONDS = 0.25
LOOKS_A_SCAN = 4  # how often children are searched for
USED = "@USED@"  # stands in the text of the ending for the GiB that were in use
_WHOLE = ("RssAnon:", "RssShmem:", "VmSwap:")
_SHARE = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")


def used_bytes(pid: int, children: list[int], limit_bytes: int) -> int:
    """Return the memory of a process and its children, in bytes; a process that is gone has none.

    Shares are only looked at where more than `limit_bytes` would be used without them: the kernel walks through all
    pages for that.
    """
    total = sum(_sum(f"/proc/{process}/status", _WHOLE) for process in (pid, *children))
    if total <= limit_bytes or not children:
        return total
    return sum(_sum(f"/proc/{process}/smaps_rollup", _SHARE) for process in (pid, *children))


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on, without this process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid]
    for parent in found:  # grows while it is walked
        found.extend(children.get(parent, ()))
    return [child for child in found if child not in (pid, os.getpid())]


def start_time(pid: int) -> str | None:
    """Return when a process was started, in ticks of the kernel; None: there is none any more."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else fields[19]


def watch(pid: int, limit_bytes: int, ended: Path, text: str, log: Path) -> bool:
    """Look at a process until it is gone, or end it; returns whether it was ended.

    Args:
        pid: of the job's process.
        limit_bytes: what it and its children may use.
        ended: the file that says how the job ended; written before the process is ended.
        text: what `ended` is to hold, with `USED` in it.
        log: the job's log, which gets the same.
    """
    started, children, looks = start_time(pid), list[int](), 0
    while started is not None and start_time(pid) == started:
        if looks % LOOKS_A_SCAN == 0:  # all processes of the machine are looked through for it
            children = descendants(pid)
        looks += 1
        used = used_bytes(pid, children, limit_bytes)
        if used > limit_bytes:
            said = text.replace(USED, f"{used / 2**30:.2f}")
            temporary = ended.with_name(f".{ended.name}.part")
            with contextlib.suppress(OSError):  # a full disk must not keep the job alive
                temporary.write_text(said)
                temporary.replace(ended)
                with log.open("a") as file:
                    file.write(said + "\n")
            for process in (pid, *descendants(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return True
        time.sleep(LOOK_SECONDS)
    return False


def _stat(pid: int) -> list[str] | None:
    """What the kernel says of a process, from its state on; None: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _sum(path: str, names: tuple[str, ...]) -> int:
    """The lines of a file of /proc that begin with one of `names`, added up, in bytes."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
