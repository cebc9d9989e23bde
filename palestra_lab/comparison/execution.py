"""Executes the grid of a comparison, one process at a time; finished runs are kept, unfinished ones resume."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from palestra.disk import open_own, private_folder
from palestra.errors import ConfigError, RunInUse
from palestra_lab.comparison.one_run import FAILED, FINISHED, STARTED, cause_of, read_record, write_record
from palestra_lab.comparison.plan import PlannedRun
from palestra_lab.comparison.progress import GridProgress

POLL_SECONDS = 0.3


class GridStopped(Exception):
    """A signal ended the grid; the running run is saved."""


class StopSignals:
    """A context manager that counts SIGINT and SIGTERM inside its block, instead of ending the process."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._count) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Wait, at most until a signal, and return whether there was one."""
        until = time.monotonic() + seconds
        while not self.received and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
        return bool(self.received)

    def _count(self, number: int, _: FrameType | None) -> None:
        self.received += 1


class GridRunner:
    """Executes the unfinished runs of a plan, each in its own process."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        command: Callable[[Path], Sequence[str]],
        checkpoints: str,
        progress: GridProgress,
        finished: Callable[[], None],
    ) -> None:
        """Prepare the grid; `run` executes it. `checkpoints` of a finished run to keep: `newest` or `none`."""
        self._runs, self._command, self._checkpoints = runs, command, checkpoints
        self._progress, self._finished = progress, finished
        self._signals = StopSignals()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Execute all unfinished runs, including failed ones, and return how many failed. Raises GridStopped after a
        signal; the current run is saved, unless it was a second signal.
        """
        failed = 0
        with self._signals:
            for number, run in enumerate(self._runs):
                if (read_record(run.record) or {}).get("state") == FINISHED:
                    continue
                failed += not self._run_one(number, run)
                self._finished()
        return failed

    def _run_one(self, number: int, run: PlannedRun) -> bool:
        """Run one run, and return whether it is finished."""
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        record = run.settings | {"checkpoints": self._checkpoints, "state": STARTED}
        write_record(run.record, record)
        self._progress.begin(number, run)
        with run.log.open("ab") as log:
            # The pipe is how the process notices that this one is dead, however it died: it then saves and ends. In a
            # session of its own it gets no Ctrl-C of the terminal, so that one place decides what a signal means.
            self._process = subprocess.Popen(
                self._command(run.record),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        try:
            while (code := self._process.poll()) is None:
                if self._signals.received:
                    with contextlib.suppress(OSError):
                        self._process.stdin.close()
                if self._signals.received > 1:
                    self._process.kill()
                self._progress.show(run, stopping=bool(self._signals.received))
                time.sleep(POLL_SECONDS)
        finally:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        state = (read_record(run.record) or {}).get("state")
        if self._signals.received and state != FINISHED:
            raise GridStopped
        if state == STARTED:
            write_record(run.record, record | {"state": FAILED, "reason": _reason(code, run.log)})
        self._progress.end(run, (read_record(run.record) or {}).get("reason"))
        if self._signals.received:
            raise GridStopped
        return state == FINISHED


def check_records(runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError for a plan that differs from its folder's existing runs, naming the first difference."""
    for run in runs:
        record = read_record(run.record)
        if record is None:
            continue
        key = first_difference({name: record[name] for name in run.settings}, run.settings)
        if key is not None:
            raise ConfigError(
                f"{run.folder} was run with another {key}; choose another `output` (or name), or remove that folder "
                f"and {run.record.name} to run it again"
            )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Prevent other processes from running the same comparison while the block is open. Raises RunInUse if another
    process runs it.
    """
    with contextlib.ExitStack() as opened:
        try:
            private_folder(folder)  # runs contain prompts
            lock = opened.enter_context(os.fdopen(open_own(folder / ".lock", os.O_RDWR | os.O_CREAT), "rb"))
        except OSError as error:
            raise ConfigError(f"the output {folder} can't be used as a folder: {cause_of(error)}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunInUse(f"another process runs the comparison in {folder}") from error
        yield


def child_command(record: Path) -> Sequence[str]:
    """Return the command line of the process for a run's record."""
    return sys.executable, "-m", "palestra.cli.main", "compare", str(record), "--child"


def first_difference(known: Any, wanted: Any, place: str = "") -> str | None:
    """Return the dotted key of the first difference between two JSON trees; None: they are equal."""
    if not (isinstance(known, dict) and isinstance(wanted, dict)):
        return None if known == wanted else place
    for key in dict.fromkeys([*wanted, *known]):
        inner = f"{place}.{key}" if place else str(key)
        if (key in known) != (key in wanted):
            return inner
        if (found := first_difference(known[key], wanted[key], inner)) is not None:
            return found
    return None


def _reason(code: int, log: Path) -> str:
    """Return why a process ended without a reason of its own: the signal that killed it, or its last line of output."""
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"its process ended with exit code {code}: {last}"
