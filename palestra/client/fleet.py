"""`Fleet`: keeps several worker processes of a machine running until the job is over, or until they are drained."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

from palestra.errors import WorkerCrashLoop
from palestra.process.child import ending

CRASHES, CRASHES_SECONDS = 5, 60.0  # a process that crashes so often in so many seconds is given up
BACKOFF_SECONDS = 0.25  # before a process is started again the second time in CRASHES_SECONDS; then doubled each time
POLL_SECONDS = 0.05
REFUSED = 2  # exit code of a child that has said why it can't work; starting it again would not help


class Crashes:
    """The crashes of one process, and the delay before its next start; used wherever workers are replaced."""

    def __init__(self) -> None:
        self._at: deque[float] = deque()  # monotonic

    def pause_after(self, who: str, how: str) -> float:
        """Record a crash, and return the seconds to wait before the next start: 0 after the first one."""
        now = time.monotonic()
        self._at.append(now)
        while now - self._at[0] > CRASHES_SECONDS:
            self._at.popleft()
        if len(self._at) >= CRASHES:
            raise WorkerCrashLoop(
                f"{who} {how}, one of {CRASHES} crashes within {CRASHES_SECONDS:g} s; its output says why"
            )
        return BACKOFF_SECONDS * 2.0 ** (len(self._at) - 2) if len(self._at) > 1 else 0.0


class Fleet:
    """Keeps `processes` child processes running until each has ended successfully.

    A child's standard input ends with this process, however that ends, so that the child notices.
    """

    def __init__(self, command: Sequence[str], processes: int, drain_seconds: float) -> None:
        """Create a fleet; `run` starts the processes. A child runs `command`, and exits with 0 when the job is over.
        `drain_seconds`: how long children may finish after `drain`, before they are killed.
        """
        self._command, self._processes, self._drain_seconds = list(command), processes, drain_seconds
        self._kill_at: float | None = None  # monotonic; None: not draining

    def drain(self) -> None:
        """Let the children finish their episodes and claim no more. A second call kills them."""
        self._kill_at = time.monotonic() + (0.0 if self._kill_at is not None else self._drain_seconds)

    def run(self) -> int:
        """Start the children, wait until all have ended, and return the exit code.

        0: the job is over or the drain is done; 1: children had to be killed; 2: a child refused.
        """
        children = [_Child(number, self._command) for number in range(self._processes)]
        try:
            while children:
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    return 1
                codes = {child: child.step(draining=self._kill_at is not None) for child in children}
                if REFUSED in codes.values():
                    return REFUSED
                children = [child for child, code in codes.items() if code is None]
                time.sleep(POLL_SECONDS)
        finally:
            for child in children:
                child.kill()
        return 0


class _Child:
    """One position of a fleet: a process, or its replacement after a pause."""

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self._name, self._command = f"worker process {number}", command
        self._process: subprocess.Popen[bytes] | None = None
        self._crashes, self._start_at, self._asked = Crashes(), 0.0, False  # monotonic; whether it was asked to end

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def step(self, draining: bool) -> int | None:
        """Return the exit code if the process has ended for good; otherwise start, ask or replace it if it is time."""
        if self._process is None:
            if not draining and time.monotonic() >= self._start_at:
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
            return 0 if draining else None
        if draining and not self._asked:
            self._asked = True
            self._process.send_signal(signal.SIGTERM)
        code = self._process.poll()
        if code is None:
            return None
        self._process.communicate()  # closes its standard input
        if code in (0, REFUSED) or draining:
            return code
        self._process, how = None, ending(code)
        pause = self._crashes.pause_after(self._name, how)
        self._start_at = time.monotonic() + pause
        sys.stderr.write(f"{self._name} {how}; started again{f' in {pause:g} s' if pause else ''}\n")
        return None
