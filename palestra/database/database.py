"""The database of a store: one thread that writes, threads that read, and retries while it does not answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import orjson
import sqlalchemy as sa

from palestra.database.backend import Backend, Schema
from palestra.database.writer import Writer
from palestra.errors import PalestraError, StoreError, StoreUnreachable

P = ParamSpec("P")
T = TypeVar("T")
CHECK_SECONDS = 0.5  # between two checks of whether the database is still there
LONGEST_REPLY_SECONDS = 10.0  # how long operations are repeated while a database does not answer


def shielded(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Shield a coroutine function from the cancellation of its callers.

    Decorates methods that commit a change and then update memory (leases, notifiers), so that memory matches the
    database even if the caller is cancelled in between.
    """

    @wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(method(*args, **kwargs))

    return run


def to_json(value: Any) -> str:
    """Return a value as compact JSON for a text column; requests with NaN and infinities were refused earlier."""
    return orjson.dumps(value).decode()


class Database:
    """Runs operations, functions of a connection, on a database for tasks of event loops.

    One thread executes all writes in the order of `submit`, so an operation sees the changes of all earlier ones.
    Waiting operations are committed together (see `Writer`). Reads run concurrently on their own connections.
    """

    def __init__(self, backend: Backend, schema: Schema) -> None:
        """Open the database, and create its tables if it is empty."""
        self._backend = backend
        try:
            with self._explained(), backend.engine.begin() as connection:
                schema.create(connection)
                fence = backend.fence(connection)
            self._problem = backend.watch()
            self._writer = Writer(backend.engine, backend.explain, self._problem, fence, backend.transaction)
            self.submit = self._writer.submit  # an operation's future resolves when its result is on disk
        except BaseException:
            backend.close()
            raise
        self._readers = ThreadPoolExecutor(backend.readers, "palestra-reader")

    @property
    def commits(self) -> int:
        """Return the number of committed transactions; it grows with every change."""
        return self._writer.commits

    def close(self) -> None:
        """Finish the submitted operations, close the database, and release its lock for other processes."""
        self._writer.close()
        self._readers.shutdown()
        self._backend.close()

    async def write(self, operation: Callable[[sa.Connection], T], tag: str | None = None) -> T:
        """Run an operation in the writing thread, and return its result when it is on disk.

        Cancelling the caller does not cancel the operation. If the database does not say whether it committed
        (StoreUnreachable), the operation runs again, so it must detect its own earlier success. If it finally raises
        StoreUnreachable, it was not committed, unless the last commit got no answer.
        """
        if not self._backend.bounded:  # the only kind of database that may not answer
            return await self.submit(operation, tag)
        given_up = False

        def unless_given_up(connection: sa.Connection) -> T:
            if given_up:
                raise StoreUnreachable("the operation has waited for too long")
            return operation(connection)

        try:
            return await self._persist(lambda: self.submit(unless_given_up, tag))
        except StoreUnreachable:
            given_up = True
            raise

    async def read(self, operation: Callable[[sa.Connection], T]) -> T:
        """Run a query on its own connection; it sees every change that was awaited before."""
        if not self._backend.bounded:
            return await self._on_reader(lambda: self.query(operation))
        return await self._persist(lambda: self._on_reader(lambda: self.query(operation)))

    def read_here(self, operation: Callable[[sa.Connection], T]) -> T:
        """Run a short query like `read`, once, blocking the calling thread."""
        return self._readers.submit(lambda: self.query(operation)).result()

    def query(self, operation: Callable[[sa.Connection], T]) -> T:
        """Run a query in the calling thread, for start-up code before the event loop."""
        with self._explained(), self._backend.read_engine.begin() as connection:
            return operation(connection)

    async def lost(self) -> StoreError:
        """Wait until the database becomes unusable, which normally never happens, and return the reason.

        Commits detect this too before they are acknowledged; this method also does so when idle.
        """
        while True:
            if (problem := self._writer.over or await self._on_reader(self._problem)) is not None:
                return problem
            await asyncio.sleep(CHECK_SECONDS)  # no event for a deleted file is sent by every kind of file system

    async def _on_reader(self, work: Callable[[], T]) -> T:
        """Run `work` in a reader thread."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._readers, work)
        except RuntimeError as error:  # requests may outlive the database, whose executor is shut down then
            raise StoreError("the store is closed") from error
        return await running

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Map errors of the database, or of decoding damaged rows, with `Backend.explain`."""
        try:
            yield
        except PalestraError:
            raise
        except Exception as error:
            explained = self._backend.explain(error)
            if explained is error:
                raise
            raise explained from explained.__cause__  # not from `error`, which shows statements and their values

    async def _persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt while the database does not answer, with growing pauses, for `LONGEST_REPLY_SECONDS`."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + LONGEST_REPLY_SECONDS, 0.05
        while True:
            try:
                return await _within(until, attempt())
            except StoreUnreachable:
                if loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)


async def _within(until: float, answer: Awaitable[T]) -> T:
    """Return an answer that comes before a time of the event loop. One that does not come is not waited for."""
    waiting = asyncio.ensure_future(answer)
    try:
        if not (await asyncio.wait({waiting}, timeout=until - asyncio.get_running_loop().time()))[0]:
            raise StoreUnreachable(f"the database did not answer for {LONGEST_REPLY_SECONDS:g} s")
        return waiting.result()
    finally:
        waiting.cancel()


# How long a task waits before it reads the database again without a notification. A change that was committed without a
# notification, because the operation failed after its commit, is noticed at most so much later.
WAKE_SECONDS = 5.0


class Notifier:
    """Wakes tasks that wait for a change of the database.

    Read `count`, query the database, then pass `count` to `wait`, which returns immediately if there was a notification
    in between.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()  # first come, first served

    async def wait(self, timeout_seconds: float, since: int) -> None:
        """Return at the next notification, or after the timeout. `since`: `count` before the caller's query; returns
        immediately if it has changed.
        """
        if self.count != since:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            async with asyncio.timeout(timeout_seconds):
                await future
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.notify(1)  # pass the wake-up on: a task that is cancelled does not act on it
            raise
        finally:
            self._waiting.pop(future, None)

    def notify(self, times: int | None = None) -> None:
        """Wake the `times` tasks that have waited longest; None: all tasks."""
        left = len(self._waiting) if times is None else times
        self.count += 1
        while left > 0 and self._waiting:
            future, _ = self._waiting.popitem(last=False)
            if not future.done():
                future.set_result(None)
                left -= 1
