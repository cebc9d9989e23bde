"""Worker processes of one machine: crashed ones are started again, and a drain lets all finish their episodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from palestra.errors import WorkersCrash

CRASHES, CRASHES_SECONDS = 5, 60.0  # a process that crashes so often in so many seconds is given up
POLL_SECONDS = 0.05
REFUSED = 2  # exit code of a child that has said why it can't work; starting it again would not help


@dataclass(slots=True)
class _Child:
    number: int
    process: subprocess.Popen[bytes]
    crashes: deque[float] = field(default_factory=deque)  # monotonic


class Fleet:
    """Keeps `processes` child processes running until each has ended well."""

    def __init__(self, command: Sequence[str], processes: int, drain_seconds: float) -> None:
        """Create a fleet; `run` starts the processes.

        Args:
            command: command line of a child, which exits with 0 when the job is over.
            processes: number of children.
            drain_seconds: how long children may take to finish after `drain`, before they are killed.
        """
        self._command, self._processes, self._drain_seconds = list(command), processes, drain_seconds
        self._kill_at: float | None = None  # monotonic; None: not draining

    def drain(self) -> None:
        """Let the children finish their episodes and claim no more. A second call kills them."""
        self._kill_at = time.monotonic() + (0.0 if self._kill_at is not None else self._drain_seconds)

    def run(self) -> int:
        """Start the children and wait until all have ended.

        Returns:
            The exit code: 0 when the job is over or the drain is done, 1 if children had to be killed, 2 if one
            refused.

        Raises:
            WorkersCrash: a child crashed again and again.
        """
        children = [self._start(number) for number in range(self._processes)]
        told = False
        try:
            while children:
                if self._kill_at is not None and not told:
                    told = True
                    for child in children:
                        child.process.send_signal(signal.SIGTERM)
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    return 1
                for child in [child for child in children if child.process.poll() is not None]:
                    code = child.process.returncode
                    if code in (0, REFUSED) or self._kill_at is not None:
                        children.remove(child)
                        if code == REFUSED:
                            return REFUSED
                    else:
                        self._again(child, code)
                time.sleep(POLL_SECONDS)
        finally:
            for child in children:
                child.process.kill()
                child.process.wait()
        return 0

    def _start(self, number: int) -> _Child:
        return _Child(number, subprocess.Popen(self._command))

    def _again(self, child: _Child, code: int) -> None:
        now = time.monotonic()
        child.crashes.append(now)
        while now - child.crashes[0] > CRASHES_SECONDS:
            child.crashes.popleft()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if len(child.crashes) >= CRASHES:
            raise WorkersCrash(
                f"worker process {child.number} {how}, one of {CRASHES} crashes within {CRASHES_SECONDS:g} s; "
                "its output says why"
            )
        sys.stderr.write(f"worker process {child.number} {how}; started again\n")
        child.process = subprocess.Popen(self._command)
