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
from palestra.rollout import RolloutSpec
from palestra.schemas.records import Task
from palestra.trainer.checkpoint import newest_path
from palestra.waiting import race

OWN_WORKER = "palestra-train"  # plays a user's rollout function in the job's process, and ends with it


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a training run left behind."""

    state: str  # "completed"; "running" where it was stopped before all was done, which `train` does not return
    run_dir: Path
    metrics: list[dict[str, float]]  # the rows of metrics.jsonl
    checkpoint: Path | None  # loads in transformers; None if none was written


class JobThread:
    """The job in a thread with an event loop of its own, where no rollout function of the user can hold it up."""

    def __init__(
        self,
        config: JobConfig,
        console: Console,
        play: RolloutSpec | None = None,
        *,
        weights: str | None = None,
        scored: Sequence[Task] | None = None,
        own_code: bool = False,
    ) -> None:
        """`play`, `weights`, `scored` and `own_code`: see `local_job`."""
        self._config, self._console, self._play = config, console, play
        self._weights, self._scored, self._own_code = weights, scored, own_code
        self._job: LocalJob | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
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

    def stop(self) -> bool:
        """Ask the job to end. Return False where it does not listen yet: it ends as soon as it would."""
        self._stopping = True  # first: the job looks at it when it is there
        if self._loop is None or self._job is None:
            return False
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._job.stop)
        return True

    @property
    def seconds_left(self) -> float | None:
        """The learner's estimate of the seconds until its last step is done; None: there is none."""
        return None if self._job is None else self._job.progress.seconds_left

    async def answer(self) -> None:
        """Return when the job's event loop has done what it was asked before, or has ended."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(_from_other_thread(answered), None)
        except RuntimeError:  # the loop is closed
            return
        await race(answered, self.ended.wait())

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
        async with local_job(
            self._config,
            self._console.report,
            self._play,
            weights=self._weights,
            scored=self._scored,
            own_code=self._own_code,
        ) as job:
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
                run_dir=job.folder.path,
                metrics=await job.plane.store.log.metrics(),
                # In a thread: whoever stops the job asks whether its event loop answers, and hashes may take long.
                checkpoint=await asyncio.to_thread(newest_path, job.folder.checkpoints),
            )


async def _give_back_of_before(job: LocalJob) -> None:
    """Give back what the process before this one was playing with a rollout function: it need not wait for a lease."""
    episodes = job.plane.store.episodes
    for episode in await episodes.claimed_by(OWN_WORKER):
        reason = "cancelled: the job was started anew"
        await episodes.abort(episode.episode_id, episode.fence, reason, discard=False, counts=False)


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
