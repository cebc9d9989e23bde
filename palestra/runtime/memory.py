"""The most memory that a job takes with all of its processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Self

LOOK_SECONDS = 0.02  # between two looks at the memory of this process
OTHERS_SECONDS = 0.5  # between two looks at the others, for which the kernel walks through their pages


class MemoryPeak:
    """Samples the memory of this process and its descendants, from a thread, while it is entered.

    Attributes:
        peak: resident bytes of this process.
        others: bytes of its descendants together, such as engine servers, each with its share of shared memory.
    """

    def __init__(self) -> None:
        """Create without samples."""
        self.peak = self.others = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="palestra-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def now(self) -> int:
        """Return the resident memory of this process in bytes; 0 without /proc."""
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        except OSError:
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _watch(self) -> None:
        due = 0.0
        while not self._over.wait(LOOK_SECONDS):
            self.peak = max(self.peak, self.now())
            if time.monotonic() >= due:
                self.others = max(self.others, sum(map(_share, child_processes(os.getpid()))))
                due = time.monotonic() + OTHERS_SECONDS


def child_processes(process: int) -> list[int]:
    """Return the descendants of a process; empty without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [process]
    for parent in found:  # the list grows during the loop
        found.extend(children.get(parent, ()))
    return found[1:]


def _share(process: int) -> int:
    """Return the bytes of a process, with its share of the memory that it has in common with others."""
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
