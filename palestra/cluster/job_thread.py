"""A job in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.cluster.console import Console
from palestra.cluster.local import LocalJob, local_job, run_on_uvloop
from palestra.config import JobConfig
from palestra.rollout import Play
from palestra.schemas.records import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a training run left behind."""

    state: str  # "completed", or "running" where it was stopped before its last step
    run_dir: Path
    metrics: list[dict[str, float]]  # the rows of metrics.jsonl
    checkpoint: Path | None  # loads in transformers; None if none was written


class JobThread:
    """The job in a thread with an event loop of its own, where no rollout function of the user can hold it up."""

    def __init__(
        self, config: JobConfig, console: Console, play: Play | None = None, scored: Sequence[Task] | None = None
    ) -> None:
        """`scored`: see `local_job`."""
        self._config, self._console, self._play, self._scored = config, console, play, scored
        self._job: LocalJob | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._result: TrainResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="palestra-server", daemon=True)

    async def start(self) -> LocalJob:
        """Returns when the data plane listens.

        Raises:
            PalestraError: the job can't be started.
        """
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

    def stop(self) -> None:
        """Ask the job to end."""
        if self._loop is not None and self._job is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._job.stop)

    def result(self) -> TrainResult:
        """Wait for the end.

        Raises:
            PalestraError: the job failed.
        """
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
        async with local_job(self._config, self._console.report, self._play, self._scored) as job:
            self._job = job
            self._console.ready(job)
            self._ready(job)
            try:
                await job.run()
            finally:
                await job.linger()
            self._result = TrainResult(
                state=job.progress.state.value,
                run_dir=job.folder.path,
                metrics=await job.plane.store.metrics(),
                checkpoint=max(job.folder.checkpoints.glob("step-*"), default=None),
            )


def _from_other_thread(target: asyncio.Future[Any] | asyncio.Event) -> Callable[[Any], None]:
    """A function that sets `target`, on the event loop of whoever calls this."""
    loop = asyncio.get_running_loop()

    def set_it(value: Any) -> None:
        if isinstance(target, asyncio.Event):
            target.set()
        elif not target.done():
            target.set_result(value)

    def call(value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(set_it, value)

    return call
