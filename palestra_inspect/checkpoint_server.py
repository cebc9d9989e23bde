"""The checkpoint served by `palestra dashboard` for its chat playground: one at a time, in another process.

The dashboard's own process loads no model, and a model's failure leaves the page alone. The program is
`python -m palestra_inspect.checkpoint_server SOCKET RUN CHECKPOINT FOLDER`. It sends these events: `{"phase": …}` while
the model is loaded, `{"url": …, "key": …, "policies": …}` when it answers, or `{"failed": …}`. It ends with the
dashboard, even if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from palestra.config import SAVED_CONFIG, JobConfig, load_config
from palestra.dashboard.progress import model_key, serving_settings
from palestra.errors import Conflict, NotFound, PalestraError
from palestra.extras import missing_extra
from palestra.models.device import available_bytes, tune_malloc
from palestra.process.channel import BlockingChannel, Channel, Event, raw
from palestra.process.child import LocalProcess, process_memory, start_process, with_owner
from palestra.process.codec import decode
from palestra.runtime.starting_points import all_checkpoints
from palestra.trainer.checkpoint import good
from palestra.waiting import race

PROGRAM = "palestra_inspect.checkpoint_server"
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
        """Apply an event of the process; see the top of this module."""
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
        self.served: Served | None = None
        self._life: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    async def load(self, run: str, folder: Path, checkpoint: str) -> Served:
        """Begin to load a checkpoint, and return at once; no effect if it is loaded already."""
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
        """Return the served checkpoint of a run. Raises Conflict: no checkpoint of the run is ready."""
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
        if (used := process_memory(pid)[1]) > most:
            return (
                f"out of memory: it took {used / 2**30:.2g} GiB, and may take {most / 2**30:.2g}, "
                f"{MEMORY_SHARE:.0%} of what was free at its start"
            )
        await asyncio.sleep(LOOK_SECONDS)


def _memory_limit() -> float:
    """Return how many bytes a process may take that is started now."""
    return available_bytes() * MEMORY_SHARE


# The process


SERVING_END_SECONDS = 10.0  # what the serving may take to end


def _main(run: Path, name: str, folder: Path) -> int:
    """Serve a checkpoint until the dashboard ends, with keys in the empty `folder`; return the exit code."""
    channel = BlockingChannel(with_owner(_end))

    def tell(**what: Any) -> None:
        channel.send(Event("told", raw(what)))

    with contextlib.suppress(OSError):
        os.nice(10)  # a job that trains on this machine comes first,
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # also where memory is short
    try:
        config = config_for(run, name, folder)
        tell(phase="loading the libraries")
        from palestra.http.server import run_on_uvloop
        from palestra.runtime.local import serve
        from palestra.runtime.starting_points import with_checkpoints

        if config.engine.has_model:
            tune_malloc()
            import torch  # noqa: F401 - takes seconds, in which the phase is not that of the model
        tell(phase=f"loading {name}")
        run_on_uvloop(
            serve(
                with_checkpoints(config),
                lambda kind, data: None,
                lambda job: tell(
                    url=job.url,
                    key=job.plane.keys.playground_key,
                    policies=list(job.plane.sessions.context.policies.names),
                ),
            )
        )
    except PalestraError as error:
        tell(failed=str(error))
        return 1
    except ModuleNotFoundError as error:
        tell(failed=missing_extra(error) or str(error))
        return 1
    return 0


def config_for(run: Path, name: str, folder: Path) -> JobConfig:
    """Return the configuration of a job that serves a checkpoint, with the newest ones of the run's other policies."""
    saved = load_config(run / SAVED_CONFIG)
    if (place := all_checkpoints(saved, run).get(name)) is None:
        raise NotFound(f"{run} has no checkpoint {name!r}, or not any more")
    if good(place.folder.parent, place.step) is None:
        raise NotFound(f"the checkpoint {name!r} was removed a moment ago")
    settings = serving_settings(run, saved) | {
        "run_dir": str(folder),
        "server.host": "127.0.0.1",
        model_key(place.policy): str(place.folder),
    }
    return load_config(run / SAVED_CONFIG, settings)


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SERVING_END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
