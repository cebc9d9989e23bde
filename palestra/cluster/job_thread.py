"""`JobThread`: a job in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
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

OWN_WORKER = "palestra-train"  # worker id of the rollout function that runs in the job's own process


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The result of a training run: its state, folder, metrics and newest checkpoint."""

    state: str  # "completed", or "running" if the run was stopped (`train` then raises)
    run_dir: Path
    metrics: list[dict[str, float]]  # the rows of metrics.jsonl
    checkpoint: Path | None  # newest checkpoint, which loads in transformers; None: none


class JobThread:
    """A job in a thread with an event loop of its own, where a user's rollout function can't block it."""

    def __init__(
        self,
        config: JobConfig,
        console: Console,
        play: RolloutSpec | None = None,
        *,
        weights: Mapping[str, str] | None = None,
        scored: Sequence[Task] | None = None,
        own_code: bool = False,
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            config: the job.
            console: is notified of the job's events.
            play: what the process plays itself; see `local_job`.
            weights: folder to load the model from; see `local_job`.
            scored: tasks to score the model on; see `local_job`.
            own_code: whether the user's own classes may be imported; see `local_job`.
        """
        self._config, self._console, self._play = config, console, play
        self._weights, self._scored, self._own_code = weights, scored, own_code
        self._job: LocalJob | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._result: TrainResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="palestra-server", daemon=True)

    async def start(self) -> LocalJob:
        """Start the job, and return it when its data plane listens.

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
        """Ask the job to end. Returns False if it does not listen yet; it then ends as soon as it would."""
        self._stopping = True  # before the check: a job that starts now reads it
        if self._loop is None or self._job is None:
            return False
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
            self._loop.call_soon_threadsafe(self._job.stop)
        return True

    @property
    def seconds_left(self) -> float | None:
        """Return the learner's estimate of the seconds until its last step is done, or None."""
        return None if self._job is None else self._job.progress.seconds_left

    async def answer(self) -> None:
        """Return when the job's event loop has done everything that it was asked before, or has ended."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(_from_other_thread(answered), None)
        except RuntimeError:  # the loop is closed
            return
        await race(answered, self.ended.wait())

    def result(self) -> TrainResult:
        """Wait for the end of the job and return its result.

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
                # In a thread, because hashing takes long: a caller of `stop` checks that the event loop answers.
                checkpoint=await asyncio.to_thread(newest_path, job.folder.checkpoints),
            )


async def _give_back_of_before(job: LocalJob) -> None:
    """Give back episodes that an earlier process of this job was playing, before their leases run out."""
    episodes = job.plane.store.episodes
    for episode in await episodes.claimed_by(OWN_WORKER):
        reason = "cancelled: the job was started anew"
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
