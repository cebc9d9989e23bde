"""The checkpoint that `palestra dashboard` serves so that its user can talk to it: one at a time, in another process.

The dashboard's own process stays light: it loads no model, and what goes wrong with one leaves the page alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from palestra.errors import Conflict
from palestra.waiting import race

LOAD_SECONDS = 600.0  # a large model takes long
IDLE_SECONDS = 600.0  # after the last reply
END_SECONDS = 5.0  # what the process may take to end
LOOK_SECONDS = 1.0  # between two looks at its memory
MEMORY_SHARE = 0.8  # of what is free at its start: the most that it may take
LAST_BYTES = 16_384  # of its log, in which the last line is looked for
IDLE = "it had nothing to do, and was ended"


@dataclass(kw_only=True)
class Served:
    """A checkpoint that is loaded, answers, or has ended.

    Attributes:
        run: the run's name on the page.
        checkpoint: by name, such as `policy@step-20`.
        state: `loading`, `ready`, or `ended`.
        phase: of the loading, in words.
        reason: why it has ended, in words; empty: it was told to.
        url: of its server, once it is ready.
        key: that calls its policies.
        policies: by name.
        began: monotonic seconds of its start.
        used: monotonic seconds of the end of its last reply.
        calls: in flight.
        end: tells it to end.
    """

    run: str
    checkpoint: str
    state: Literal["loading", "ready", "ended"] = "loading"
    phase: str = "starting a process"
    reason: str = ""
    url: str = ""
    key: str = ""
    policies: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    used: float = 0.0
    calls: int = 0
    end: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, told: dict[str, Any]) -> None:
        """Take over what the process has told; see `checkpoint_process`."""
        self.phase = told.get("phase", self.phase)
        self.reason = told.get("failed", self.reason)
        if "url" in told:
            self.url, self.key, self.policies = told["url"], told["key"], told["policies"]
            self.state, self.used = "ready", time.monotonic()

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Count a call as in flight while the block is open."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            self.used = time.monotonic()


class CheckpointServer:
    """Serves one checkpoint at a time; another one takes its place."""

    def __init__(self) -> None:
        """Serve none yet."""
        self.served: Served | None = None
        self._life: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    async def load(self, run: str, folder: Path, checkpoint: str) -> Served:
        """Begin to load a checkpoint; return at once. One that is there already is left alone.

        Args:
            run: name of the run on the page.
            checkpoint: by name.
        """
        async with self._changing:
            now = self.served
            if now is not None and now.state != "ended" and (now.run, now.checkpoint) == (run, checkpoint):
                return now
            await self._end()
            self.served = served = Served(run=run, checkpoint=checkpoint)
            self._life = asyncio.create_task(_live(served, folder))
            return served

    async def end(self) -> None:
        """End what is served, and return when nothing of it is left."""
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        if self.served is not None and self._life is not None:
            self.served.end.set()
            await self._life
            self._life = None

    def ready(self, run: str) -> Served:
        """Return what is served of a run.

        Raises:
            Conflict: nothing of it is, or not yet.
        """
        if self.served is None or self.served.run != run or self.served.state != "ready":
            raise Conflict("no checkpoint of this run is loaded, or not any more; load one first")
        return self.served


async def _live(served: Served, run: Path) -> None:
    """Start the process of a checkpoint, and watch it until it ends, or is ended."""
    folder = Path(tempfile.mkdtemp(prefix="palestra-talk-"))
    log, process = folder / "log.txt", None
    try:
        with log.open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "palestra.runtime.checkpoint_process",
                str(run),
                served.checkpoint,
                str(folder / "run"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=said,
                start_new_session=True,  # Ctrl-C is for the dashboard, which then ends it
            )
        most = _memory_limit()
        ended = await race(_until_idle(served, process), _until_too_large(process, most), served.end.wait())
        if ended.index < 2:
            served.reason = str(ended.result) or served.reason or _why(process, log)
    except OSError as error:
        served.reason = f"its process can't be started: {error}"
    finally:
        if process is not None:
            await _stop(process)
        served.state = "ended"
        shutil.rmtree(folder, ignore_errors=True)


async def _until_idle(served: Served, process: Process) -> str:
    """Return why a process is to be ended, in words; empty: it has ended by itself."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            while served.state == "loading":
                if not (line := await process.stdout.readline()):
                    await process.wait()
                    return ""
                served.take(json.loads(line))
    except TimeoutError:
        return f"it was not loaded within {LOAD_SECONDS:g} s"
    while process.returncode is None:
        left = IDLE_SECONDS if served.calls else served.used + IDLE_SECONDS - time.monotonic()
        if left <= 0.0:
            return IDLE
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await process.wait()
    return ""


async def _until_too_large(process: Process, most: float) -> str:
    """Return when a process takes more memory than `most` bytes, and say so in words."""
    while True:
        if (used := _resident_bytes(process.pid)) > most:
            return (
                f"out of memory: it took {used / 2**30:.2g} GiB, and may take {most / 2**30:.2g}, "
                f"{MEMORY_SHARE:.0%} of what was free at its start"
            )
        await asyncio.sleep(LOOK_SECONDS)


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process; 0: it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _memory_limit() -> float:
    """Return how many bytes a process may take that is started now; any number, if the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 * MEMORY_SHARE
    return math.inf


async def _stop(process: Process) -> None:
    """End a process and all that it has started."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
    await process.wait()


def _why(process: Process, log: Path) -> str:
    """Return why a process has ended, from its exit code and the last line that it has written."""
    if process.returncode is not None and process.returncode < 0:
        return f"its process was ended by {signal.Signals(-process.returncode).name}"
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(log.stat().st_size - LAST_BYTES, 0))
        if lines := file.read(LAST_BYTES).decode(errors="replace").strip().splitlines():
            return f"its process ended: {lines[-1][:500]}"
    return "its process ended, and said nothing"
