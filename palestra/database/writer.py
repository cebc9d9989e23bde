"""One thread that owns the only writing connection, and commits whatever has gathered in one transaction.

A caller awaits the commit, never the disk on the event loop; under load many calls share one fsync.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa

from palestra.database.backend import Explain, Problem, no_problem
from palestra.errors import PalestraError, StoreError
from palestra.faults import fault_point

T = TypeVar("T")
MAX_BATCH = 256


@dataclass(slots=True)
class _Operation:
    run: Callable[[sa.Connection], Any]
    tag: str | None  # names its fault points, e.g. `chat_commit`
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = field(default=None)


class Writer:
    """Runs operations in order, groups of them in one transaction.

    An operation that raises a `PalestraError` must do so before it writes. Any other error undoes the group,
    whose operations are then tried one by one, so that one bad operation never takes others with it.
    """

    def __init__(self, engine: sa.Engine, explain: Explain, problem: Problem = no_problem) -> None:
        """Start the thread.

        Args:
            engine: of the database.
            explain: puts an error of the database into words.
            problem: what keeps a commit from being acknowledged, if anything does; asked after each one. From then on
                nothing is committed any more.
        """
        self._engine, self._explain, self._problem = engine, explain, problem
        self._over: StoreError | None = None  # what `problem` found
        self._queue: queue.SimpleQueue[list[_Operation] | None] = queue.SimpleQueue()
        self._gathering: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}  # of this turn of each event loop
        self._closed = False
        self.commits = 0
        self._thread = threading.Thread(target=self._loop, name="palestra-writer", daemon=True)
        self._thread.start()

    @property
    def over(self) -> StoreError | None:
        """Why nothing is committed any more, also where what `problem` found has passed since; None: all is well."""
        return self._over

    def submit(self, run: Callable[[sa.Connection], T], tag: str | None = None) -> asyncio.Future[T]:
        """Run an operation; the future has its result when it is on disk.

        Whoever cancels the future does not take the operation back: it is committed all the same.
        """
        if self._closed:
            raise StoreError("the store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        operation = _Operation(run, tag, loop, future)
        if (gathered := self._gathering.get(loop)) is not None:
            gathered.append(operation)
        else:
            self._gathering[loop] = [operation]
            loop.call_soon(self._hand_over, loop)  # once a turn: waking the thread takes longer than an insert
        return future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if gathered := self._gathering.pop(loop, None):
            self._queue.put(gathered)

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        self._closed = True
        for loop in list(self._gathering):
            self._hand_over(loop)
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        with self._engine.connect() as connection:
            while (first := self._queue.get()) is not None:
                group, last = first, False
                while len(group) < MAX_BATCH and not last:
                    try:
                        following = self._queue.get_nowait()
                    except queue.Empty:
                        break
                    if following is None:
                        last = True
                    else:
                        group += following
                for start in range(0, len(group), MAX_BATCH):
                    self._commit(connection, group[start : start + MAX_BATCH])
                if last:
                    return

    def _commit(self, connection: sa.Connection, group: list[_Operation]) -> None:
        if self._over is not None:
            self._refuse(group, self._over)
            return
        try:
            self._transaction(connection, group)
        except Exception as error:  # noqa: BLE001 - handed to the callers
            if len(group) == 1:
                group[0].error = self._explain(error)
                _deliver(group)
            else:
                for operation in group:
                    operation.result = operation.error = None
                    self._commit(connection, [operation])
        else:
            self._over = self._problem()  # as late as it can be, so that as little as can be comes between
            if self._over is None:
                _deliver(group)
            else:
                self._refuse(group, self._over)

    def _refuse(self, group: list[_Operation], error: StoreError) -> None:
        for operation in group:
            operation.result, operation.error = None, error
        _deliver(group)

    def _transaction(self, connection: sa.Connection, group: list[_Operation]) -> None:
        with connection.begin():
            for operation in group:
                try:
                    operation.result = operation.run(connection)
                except PalestraError as error:
                    operation.error = error
            for operation in group:
                if operation.tag and operation.error is None:
                    fault_point(f"before_{operation.tag}")
        self.commits += 1
        for operation in group:
            if operation.tag and operation.error is None:
                fault_point(f"after_{operation.tag}")


def _deliver(group: list[_Operation]) -> None:
    """Hand results to the event loops: one wake-up for all operations of a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
    for operation in group:
        by_loop.setdefault(operation.loop, []).append(operation)
    for loop, operations in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, operations)


def _resolve(operations: list[_Operation]) -> None:
    for operation in operations:
        if operation.future.done():
            continue
        if operation.error is not None:
            operation.future.set_exception(operation.error)
        else:
            operation.future.set_result(operation.result)
