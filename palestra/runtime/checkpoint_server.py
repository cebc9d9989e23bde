"""The checkpoint served by `palestra dashboard` for its chat playground: one at a time, in another process.

The dashboard's own process loads no model, and a model's failure leaves the page alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from palestra.errors import Conflict
from palestra.process.channel import Channel, Event
from palestra.process.child import LocalProcess, start_process
from palestra.process.codec import decode
from palestra.waiting import race

PROGRAM = "palestra.runtime.checkpoint_process"
LOAD_SECONDS = 600.0  # a large model takes long
IDLE_SECONDS = 600.0  # after the last reply
END_SECONDS = 5.0  # what the process may take to end
LOOK_SECONDS = 1.0  # between two looks at its memory
MEMORY_SHARE = 0.8  # of what is free at its start: the most that it may take
IDLE = "it had nothing to do, and was ended"


@dataclass(kw_only=True)
class Served:
    """A checkpoint that is loading, ready, or ended.

    Attributes:
        run: the run's name on the page.
        checkpoint: by name, such as `policy@step-20`.
        reason: why it ended; empty: on request.
        url: of its server, once it is ready.
        key: for calls of its policies.
        began: start, in monotonic seconds.
        used: end of its last reply, in monotonic seconds.
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
        """Apply an event of the process; see `checkpoint_process`."""
        self.phase = told.get("phase", self.phase)
        self.reason = told.get("failed", self.reason)
        if "url" in told:
            self.url, self.key, self.policies = told["url"], told["key"], told["policies"]
            self.state, self.used = "ready", time.monotonic()

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Count a call as in flight in this block."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            self.used = time.monotonic()


class CheckpointServer:
    """Serves one checkpoint at a time; loading another replaces it."""

    def __init__(self) -> None:
        """Serve none yet."""
        self.served: Served | None = None
        self._life: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    async def load(self, run: str, folder: Path, checkpoint: str) -> Served:
        """Begin to load a checkpoint, and return at once; no effect if it is loaded already.

        Args:
            run: name of the run on the page.
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
        """End the served checkpoint, and wait until it has released everything."""
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        if self.served is not None and self._life is not None:
            self.served.end.set()
            await self._life
            self._life = None

    def ready(self, run: str) -> Served:
        """Return the served checkpoint of a run.

        Raises:
            Conflict: no checkpoint of the run is ready.
        """
        if self.served is None or self.served.run != run or self.served.state != "ready":
            raise Conflict("no checkpoint of this run is loaded, or not any more; load one first")
        return self.served


async def _live(served: Served, run: Path) -> None:
    """Start the process of a checkpoint, and watch it until it ends, or is ended."""
    folder = Path(tempfile.mkdtemp(prefix="palestra-talk-"))
    words, process = (str(run), served.checkpoint, str(folder / "run")), None
    try:
        process = await start_process(PROGRAM, {}, *words, log=folder / "log.txt")
        most, channel = _memory_limit(), await Channel.over(process.connection)
        ended = await race(
            _until_idle(served, process, channel), _until_too_large(process.pid, most), served.end.wait()
        )
        channel.close()
        if ended.index < 2:
            served.reason = str(ended.result) or served.reason or f"its process {await process.how_ended()}"
    except OSError as error:
        served.reason = f"its process can't be started: {error}"
    finally:
        if process is not None:
            await process.end(END_SECONDS)
        served.state = "ended"
        shutil.rmtree(folder, ignore_errors=True)


async def _until_idle(served: Served, process: LocalProcess, channel: Channel) -> str:
    """Return why a process is to be ended, in words; empty: it has ended by itself."""
    frames = channel.frames()
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            while served.state == "loading":
                if (messages := await anext(frames, None)) is None:
                    await process.code()
                    return ""
                for message in messages:
                    if isinstance(message, Event):
                        served.take(decode(dict[str, Any], message.value))
    except TimeoutError:
        return f"it was not loaded within {LOAD_SECONDS:g} s"
    ended = asyncio.ensure_future(process.code())
    while not ended.done():
        left = IDLE_SECONDS if served.calls else served.used + IDLE_SECONDS - time.monotonic()
        if left <= 0.0:
            return IDLE
        await asyncio.wait((ended,), timeout=left)
    return ""


async def _until_too_large(pid: int, most: float) -> str:
    """Return when a process takes more memory than `most` bytes, and say so in words."""
    while True:
        if (used := _resident_bytes(pid)) > most:
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
