"""A job in a thread with its own event loop, its waiting caller, and the handling of signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.http.server import run_on_uvloop
from palestra.models.device import tune_malloc
from palestra.rollout import RolloutSpec
from palestra.runtime.console import Console
from palestra.runtime.local import local_job
from palestra.runtime.local_job import LocalJob
from palestra.runtime.starting_points import newest_checkpoints
from palestra.runtime.terms import USUAL, JobTerms
from palestra.waiting import race

T = TypeVar("T")
NUMBERS = (signal.SIGINT, signal.SIGTERM)


OWN_WORKER = "palestra-train"  # worker id of the rollout function that runs in the job's own process


class Interrupts:
    """A context manager in which SIGINT and SIGTERM request a stop; `raise_received` then ends the caller's script.

    The handlers are Python's, not an event loop's, so that they also work if the caller blocks inside a running loop (a
    notebook). Outside the main thread there are none, because Python delivers signals only to the main thread.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        """Prepare the handlers, which are installed while the block is open. `stop`: requests the end of the work;
        returns False if there is nothing to wait for.
        """
        self._stop = stop
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python

    def raise_received(self, said: str) -> None:
        """End the script if a signal was received.

        Raises:
            KeyboardInterrupt, SystemExit: after SIGINT, or SIGTERM (exit code 143). They are not subclasses of
                Exception, so a script's handlers do not mistake them for a failed step.
        """
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt(said)
        if self.received is not None:
            raise SystemExit(128 + self.received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if not self._stop() or again:  # a second signal does not wait
            self.raise_received("interrupted before anything could be saved" if not again else "interrupted twice")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine here, or in its own thread if an event loop is running here (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    done: Future[T] = Future()

    def body() -> None:
        try:
            done.set_result(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            done.set_exception(error)

    # A daemon: a second Ctrl-C ends the process without it.
    threading.Thread(target=body, name="palestra-foreground", daemon=True).start()
    return done.result()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The result of a training run: its state, folder, metrics and newest checkpoints.

    Attributes:
        state: `completed`, or `running` if the run was stopped (`train` then raises).
        run_dir: the run's folder.
        metrics: the rows of metrics.jsonl.
        checkpoints: newest checkpoint of each trained policy, by name; it loads in transformers. Policies without a
            checkpoint are left out. A reward model is in the folder `reward_model` of the checkpoint.
    """

    state: str
    run_dir: Path
    metrics: list[dict[str, float]]
    checkpoints: dict[str, Path]

    @property
    def checkpoint(self) -> Path | None:
        """Return the newest checkpoint of the only trained policy; None: no checkpoint.

        Raises:
            ConfigError: several policies are trained.
        """
        if len(self.checkpoints) > 1:
            names = " and ".join(map(repr, self.checkpoints))
            raise ConfigError(f"the run has trained {names}; take the checkpoint of one: result.checkpoints[NAME]")
        return next(iter(self.checkpoints.values()), None)

    def __repr__(self) -> str:
        """Return the result in a line, with the number of rows instead of the rows."""
        if len(self.checkpoints) > 1:
            shown = f"checkpoints={ {name: str(path) for name, path in self.checkpoints.items()} }"
        else:
            shown = f"checkpoint={None if self.checkpoint is None else str(self.checkpoint)!r}"
        where = f"run_dir={str(self.run_dir)!r}, {shown}"
        return f"TrainResult(state={self.state!r}, {where}, metrics={len(self.metrics)} rows)"


class JobThread:
    """A job in a thread with its own event loop, which a user's rollout function cannot block."""

    def __init__(
        self,
        config: JobConfig,
        console: Console,
        play: RolloutSpec | None = None,
        terms: JobTerms = USUAL,
    ) -> None:
        """Prepare the thread; `start` starts it."""
        if config.engine.has_model:
            tune_malloc()  # here, because `start` is called in a thread that exists already, beside the console's
        self._config, self._console, self._play, self._terms = config, console, play, terms
        self._job: LocalJob | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._result: TrainResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="palestra-server", daemon=True)

    async def start(self) -> LocalJob:
        """Start the job, and return it when its data plane listens."""
        ready: asyncio.Future[LocalJob | None] = asyncio.get_running_loop().create_future()
        self._ready = _from_other_thread(ready)
        self.ended = asyncio.Event()
        self._on_end = _from_other_thread(self.ended)
        self._thread.start()
        job = await ready
        if job is None:
            self.result()
        assert job is not None
        return job

    def stop(self) -> bool:
        """Ask the job to end; False: it does not listen yet, and ends when it would."""
        self._stopping = True  # before the check: a job that starts now reads it
        if self._loop is None or self._job is None:
            return False
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
            self._loop.call_soon_threadsafe(self._job.stop)
        return True

    @property
    def seconds_left(self) -> float | None:
        """Return the learner's estimate of the remaining seconds, or None."""
        return None if self._job is None else self._job.progress.seconds_left

    async def answer(self) -> None:
        """Wait until the job's event loop has processed all earlier requests, or has ended."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(_from_other_thread(answered), None)
        except RuntimeError:  # the loop is closed
            return
        await race(answered, self.ended.wait())

    def result(self) -> TrainResult:
        """Wait for the end of the job and return its result."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _main(self) -> None:
        try:
            run_on_uvloop(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised in `result`
            self._error = error
        finally:
            self._ready(None)
            self._on_end(None)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with local_job(self._config, self._console.report, self._play, self._terms) as job:
            await _give_back_of_before(job)
            self._job = job
            if self._stopping:
                job.stop()
            self._console.ready(job)
            self._ready(job)
            try:
                await job.run()
            finally:
                await job.linger()
            self._result = TrainResult(
                state=job.progress.state.value,
                run_dir=job.opened.folder.path,
                metrics=await job.plane.store.log.metrics(),
                # In a thread, because hashing takes long: a caller of `stop` checks that the event loop answers.
                checkpoints=await asyncio.to_thread(newest_checkpoints, self._config),
            )


async def _give_back_of_before(job: LocalJob) -> None:
    """Give back episodes that an earlier process of this job was playing, before their leases run out."""
    episodes = job.plane.store.episodes
    for episode in await episodes.claimed_by(OWN_WORKER):
        reason = "cancelled: the job was started again"
        await episodes.abort(episode.episode_id, episode.fence, reason, discard=False, counts=False)


def _from_other_thread(target: asyncio.Future[Any] | asyncio.Event) -> Callable[[Any], None]:
    """Return a function, callable from any thread, that sets `target` on the event loop of this caller."""
    loop = asyncio.get_running_loop()

    def set_it(value: Any) -> None:
        if isinstance(target, asyncio.Event):
            target.set()
        elif not target.done():
            target.set_result(value)

    def call(value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(set_it, value)

    return call
