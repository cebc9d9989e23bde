"""Kills a job whose processes use more memory than allowed: a separate process, so that no job can block it.

It only imports the standard library and `process/keeper.py`: it costs about 12 MiB per job, and must not need memory or
imports when memory is short. It counts memory that the kernel cannot reclaim: anonymous and shared memory, even if
swapped out, but neither reserved address space nor pages of files. Shared memory of a process and its children is
counted once, by proportional shares.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from palestra.process.keeper import descendants_of, process_start

LOOK_SECONDS = 0.25
LOOKS_A_SCAN = 4  # children are searched for at every fourth look
USED = "@USED@"  # placeholder in the text of the ending for the GiB in use
_WHOLE = ("RssAnon:", "RssShmem:", "VmSwap:")
_SHARE = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")


def used_bytes(pid: int, children: Collection[int], limit_bytes: int) -> int:
    """Return the memory of a process and its children, in bytes; 0 for an ended process.

    Proportional shares are only computed if the sum without them exceeds `limit_bytes`, because the kernel walks
    through all pages for them. `limit_bytes`: up to this sum, shared memory may be counted more than once.
    """
    total = sum(_sum(f"/proc/{process}/status", _WHOLE) for process in (pid, *children))
    if total <= limit_bytes or not children:
        return total
    return sum(_sum(f"/proc/{process}/smaps_rollup", _SHARE) for process in (pid, *children))


def watch(pid: int, limit_bytes: int, ended: Path, text: str, log: Path) -> bool:
    """Watch a process until it ends, or kill it; return whether it was killed.

    Args:
        limit_bytes: of the process and its children together.
        ended: file for the job's ending; written before the process is killed.
        text: content of `ended`, with the placeholder `USED`.
        log: the job's log, to which the text is appended.
    """
    started, children, looks = process_start(pid), set[int](), 0
    while started and process_start(pid) == started:
        if looks % LOOKS_A_SCAN == 0:  # not at every look: it reads all processes of the machine
            children = descendants_of(pid) - {os.getpid()}
        looks += 1
        used = used_bytes(pid, children, limit_bytes)
        if used > limit_bytes:
            said = text.replace(USED, f"{used / 2**30:.2f}")
            temporary = ended.with_name(f".{ended.name}.part")
            # As `disk.write_whole` does, which this script can't import; a full disk must not keep the job alive.
            with contextlib.suppress(OSError):
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(said)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(ended)
                with log.open("a", encoding="utf-8") as file:
                    file.write(said + "\n")
            for process in {pid, *descendants_of(pid)} - {os.getpid()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return True
        time.sleep(LOOK_SECONDS)
    return False


def _sum(path: str, names: tuple[str, ...]) -> int:
    """Return the sum, in bytes, of the lines of a file in /proc that begin with one of `names`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def watching(pid: int, limit_bytes: int, ended: Path, text: str, log: Path) -> list[str]:
    """Return the command of a process that calls `watch`, without packages of others."""
    code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from pathlib import Path; "
    code += f"from {__name__} import watch; "
    code += "_, pid, most, ended, text, log = sys.argv; watch(int(pid), int(most), Path(ended), text, Path(log))"
    return [sys.executable, "-I", "-S", "-c", code, str(pid), str(limit_bytes), str(ended), text, str(log)]
