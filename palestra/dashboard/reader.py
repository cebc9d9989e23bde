"""Reading of runs in threads, so that neither the event loop nor another run waits for a run that is slow to read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from palestra.dashboard.answers import FindingsAnswer, RunAnswer
from palestra.dashboard.episode import EpisodeReading, read_reading
from palestra.dashboard.progress import describe_run, unreadable
from palestra.dashboard.runs import DAMAGED, Run
from palestra.doctor.examination import RULES, add_facts, examine_store
from palestra.errors import NotFound, PalestraError, ServerStopping, StoreError, StoreUnreachable
from palestra.threads import in_thread

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
READINGS = 6  # episodes that are kept for further pages of their tokens
AT_ONCE = 2  # reads of a run at the same time, so that many pages do not hold up a job
# What a read may take beside the run's database, whose queries have a shorter limit: the first one of tokens loads a
# tokenizer, which imports transformers.
READ_SECONDS = 30.0
MOST_PAUSE_SECONDS = 1.0  # between two searches of a run
LIST_SECONDS = 5.0  # what the list of runs waits for a run
KEPT_SECONDS = 0.9  # how old the line of a run may be, and its findings
COST = 3.0  # what took long is kept for so many times as long


class _Turn:
    """Serializes the searches of a run.

    Attributes:
        after: when the next search may begin, in monotonic seconds.
    """

    def __init__(self) -> None:
        self.lock, self.after = asyncio.Lock(), 0.0


class _Reading(NamedTuple):
    """An episode that was read."""

    begun: tuple[int, ...]
    seen: tuple[int, ...]
    reading: EpisodeReading


class _Kept(Generic[T]):
    """Answers about runs that may be a little old, so that many pages ask for them no more often than one."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, T]] = {}  # by name of the run: until when the answer is good, by the clock
        self._asking: dict[str, asyncio.Task[T]] = {}

    def pop(self, name: str, default: None) -> None:
        """Forget the answer about a run."""
        self._known.pop(name, default)

    async def get(self, name: str, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return a recent answer about a run, or read it now. Errors are not cached."""
        known = self._known.get(name)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        if name not in self._asking:
            task = self._asking[name] = asyncio.create_task(self._read(name, read))
            # Those who wait get the error; asyncio would log it if all of them have gone.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._asking[name])

    async def _read(self, name: str, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        began = time.monotonic()
        try:
            found = await read()
        finally:
            del self._asking[name]
        now = time.monotonic()
        self._known[name] = now + max(KEPT_SECONDS, COST * (now - began)), found
        return found


class Reader:
    """Reads runs in threads, a few per run at the same time, and caches recent episodes."""

    def __init__(self, runs: Sequence[Run], stopping: asyncio.Event, most: int | None = None) -> None:
        """Create a reader. `most`: limit of added runs; the oldest is forgotten. None: unlimited, and an error lists
        them.
        """
        self._stopping, self._most = stopping, most
        self.runs: OrderedDict[str, Run] = OrderedDict()
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._searches: dict[str, _Turn] = {}
        self._described, self._findings = _Kept[RunAnswer](), _Kept[FindingsAnswer]()
        self._readings: OrderedDict[tuple[str, str], _Reading] = OrderedDict()
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        """Add a run, unless its name is known."""
        self.runs.setdefault(run.name, run)
        self.runs.move_to_end(run.name)
        if self._most is not None and len(self.runs) > self._most:
            name, _ = self.runs.popitem(last=False)
            for kept in (self._slots, self._searches, self._described, self._findings):
                kept.pop(name, None)

    def run(self, name: str) -> Run:
        """Return a run by its name."""
        if name not in self.runs:
            known = f"; there are {', '.join(self.runs)}" if self._most is None else ""
            raise NotFound(f"there is no run {name!r} here{known}")
        return self.runs[name]

    async def read_run(self, name: str, work: Callable[Concatenate[Run, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a blocking function for a run."""
        run = self.run(name)
        return await self.read(run, lambda: work(run, *args, **kwargs))

    async def read(self, run: Run, work: Callable[[], T]) -> T:
        """Return the result of a blocking function."""
        slots, loop = self._slots.setdefault(run.name, asyncio.Semaphore(AT_ONCE)), asyncio.get_running_loop()

        def then_release() -> T:
            try:
                return work()
            finally:  # not when the caller has gone: the thread may still read then
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    loop.call_soon_threadsafe(slots.release)

        try:
            async with asyncio.timeout(READ_SECONDS):
                await slots.acquire()
                return await in_thread(then_release, "palestra-page")
        except TimeoutError as error:
            raise StoreUnreachable(
                f"{run.folder} could not be read within {READ_SECONDS:g} s; it is damaged, or the machine is busy"
            ) from error
        except DAMAGED as error:
            if isinstance(error, PalestraError):
                raise
            log.debug("a record of %s can't be read", run.folder, exc_info=error)
            raise StoreError(
                f"a record of {run.folder} can't be read: {type(error).__name__}: {error}"[:500]
            ) from error

    async def search(self, run: Run, work: Callable[[], T]) -> T:
        """Return the result of a CPU-heavy search. After each search, a pause of the same length follows."""
        turn = self._searches.setdefault(run.name, _Turn())
        async with turn.lock:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(turn.after - time.monotonic(), 0.0)):
                    await self._stopping.wait()
            if self._stopping.is_set():
                raise ServerStopping("the server is ending")
            began = time.monotonic()
            try:
                return await self.read(run, work)
            finally:
                now = time.monotonic()
                turn.after = now + min(now - began, MOST_PAUSE_SECONDS)

    async def described(self, run: Run) -> RunAnswer:
        """Return the progress of a run, possibly a little old; a run that cannot be read says why."""
        return await self._described.get(run.name, lambda: self._describe(run))

    async def _describe(self, run: Run) -> RunAnswer:
        try:
            return await self.read(run, lambda: describe_run(run))
        except PalestraError as error:
            return unreadable(run, str(error))

    async def findings(self, run: Run, step: int = 0) -> FindingsAnswer:
        """Return the doctor's findings for a run, possibly a little old. `step`: read the run again if the cached
        answer is from an earlier step.
        """
        found = await self._findings.get(run.name, lambda: self._find(run))
        if found.step >= step:
            return found
        self._findings.pop(run.name, None)
        return await self._findings.get(run.name, lambda: self._find(run))

    async def _find(self, run: Run) -> FindingsAnswer:
        return await self.search(run, lambda: read_findings(run))

    async def described_all(self) -> list[RunAnswer]:
        """Return the progress of each run; one that takes too long counts as unreadable."""
        return await self.described_each(list(self.runs.values()))

    async def described_each(self, runs: Sequence[Run]) -> list[RunAnswer]:
        """Return the progress of some runs; one that takes too long counts as unreadable."""
        if not runs:
            return []
        asked = {run.name: asyncio.ensure_future(self.described(run)) for run in runs}
        _, late = await asyncio.wait(asked.values(), timeout=LIST_SECONDS)
        for task in late:
            task.cancel()
        why = f"reading it takes more than {LIST_SECONDS:g} s; load the page again later"
        return [unreadable(self.runs[name], why) if task in late else task.result() for name, task in asked.items()]

    async def reading(self, name: str, episode_id: str) -> EpisodeReading:
        """Return an episode, cached if it cannot have changed."""
        run, key = self.run(name), (name, episode_id)
        begun, seen = run.begun, run.seen
        known = self._readings.get(key)
        if known is not None and known.begun == begun and (known.seen == seen or known.reading.settled):
            self._readings.move_to_end(key)
            return known.reading
        found = await self.read(run, lambda: read_reading(run, episode_id))
        self._readings[key] = _Reading(begun, seen, found)
        while len(self._readings) > READINGS:
            self._readings.popitem(last=False)
        return found


def read_findings(run: Run) -> FindingsAnswer:
    """Return the findings over all steps of a run."""
    config, kept, more = run.config, run.memory.examined, True
    while more:  # each with the whole time of a connection; what was read is kept where one takes too long
        with run.open() as connection:
            more = add_facts(connection, kept)
    with run.open() as connection:
        found = examine_store(connection, config, run.folder, kept)
    return FindingsAnswer(run=run.name, rules=len(RULES), **dict(found))
