"""One thread with the only writing connection, which commits waiting operations in one transaction.

Callers await their commit, and the event loop never waits for the disk; under load many calls share one fsync.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa

from palestra import faults
from palestra.database.backend import Explain, Fence, Problem, Transaction, no_problem
from palestra.errors import PalestraError, StoreError, Superseded

T = TypeVar("T")
MAX_BATCH = 256


@dataclass(slots=True)
class _Operation:
    """A submitted operation with its caller's future and, after it ran, its result or error.

    Attributes:
        tag: names the fault points around the commit, such as `chat_commit`; None: no fault points.
        loop: the caller's event loop, which resolves the future.
    """

    run: Callable[[sa.Connection], Any]
    tag: str | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = field(default=None)


class Writer:
    """Runs operations in order, in groups that are one transaction each.

    An operation must raise a `PalestraError` before its first change. Any other error rolls the group back, and its
    operations are committed one by one, so that one failure does not affect others.
    """

    def __init__(
        self,
        engine: sa.Engine,
        explain: Explain,
        problem: Problem = no_problem,
        fence: Fence | None = None,
        transaction: Transaction = sa.Connection.begin,
    ) -> None:
        """Start the writing thread.

        Args:
            explain: maps database errors to callers' errors; see `Backend`.
            problem: called after each commit; an error that it returns fails this commit and all later operations.
            fence: called first in each transaction; if it raises Superseded, all later operations fail.
        """
        self._engine, self._explain, self._problem, self._fence = engine, explain, problem, fence
        self._begun = transaction
        self._over: StoreError | None = None
        self._queue: queue.SimpleQueue[list[_Operation] | None] = queue.SimpleQueue()
        self._gathering: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
        self._closed = False
        self.commits = 0
        self._thread = threading.Thread(target=self._loop, name="palestra-writer", daemon=True)
        self._thread.start()

    @property
    def over(self) -> StoreError | None:
        """Return the error with which all operations fail from now on, from `problem` or `fence`; None: all is well."""
        return self._over

    def submit(self, run: Callable[[sa.Connection], T], tag: str | None = None) -> asyncio.Future[T]:
        """Queue an operation; the future resolves when the commit is on disk.

        Cancelling the future does not cancel the operation, which runs once and must raise PalestraErrors before its
        first change. `tag`: names the fault points before and after the commit, such as `chat_commit`.
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
            # Waking the thread takes longer than an insert, so all operations of a turn of the loop wake it once.
            loop.call_soon(self._hand_over, loop)
        return future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the thread all operations that the tasks of an event loop submitted in this turn of the loop."""
        if gathered := self._gathering.pop(loop, None):
            self._queue.put(gathered)

    def close(self) -> None:
        """Finish the submitted operations, then stop the thread."""
        self._closed = True
        for loop in list(self._gathering):
            self._hand_over(loop)
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        """Commit the operations that have gathered in the queue, at most `MAX_BATCH` together, until `close`."""
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
        """Commit a group in one transaction and deliver the results; if that fails, commit one by one."""
        if self._over is not None:
            self._refuse(group, self._over)
            return
        try:
            self._transaction(connection, group)
        except Superseded as error:
            self._over = error
            self._refuse(group, error)
        except Exception as error:  # noqa: BLE001 - handed to the callers
            if len(group) == 1:
                group[0].error = self._explain(error)
                _deliver(group)
            else:
                for operation in group:
                    operation.result = operation.error = None
                    self._commit(connection, [operation])
        else:
            # Checked after the commit and just before the acknowledgement, so that almost nothing can happen between.
            self._over = self._problem()
            if self._over is None:
                _deliver(group)
            else:
                self._refuse(group, self._over)

    def _refuse(self, group: list[_Operation], error: StoreError) -> None:
        """Fail every operation of the group with `error`."""
        for operation in group:
            operation.result, operation.error = None, error
        _deliver(group)

    def _transaction(self, connection: sa.Connection, group: list[_Operation]) -> None:
        """Run the operations of a group in one transaction; a PalestraError fails its own operation only."""
        with self._begun(connection):
            if self._fence is not None:
                self._fence(connection)
            for operation in group:
                try:
                    operation.result = operation.run(connection)
                except PalestraError as error:
                    operation.error = error
            if faults.armed is not None:
                _pass_points("before", group)
        self.commits += 1
        if faults.armed is not None:
            _pass_points("after", group)


def _pass_points(side: str, group: list[_Operation]) -> None:
    """Pass the fault points before or after the commit of operations."""
    for operation in group:
        if operation.tag and operation.error is None:
            faults.fault_point(f"{side}_{operation.tag}")


def _deliver(group: list[_Operation]) -> None:
    """Hand results to the event loops of the callers, with one wake-up for all operations of a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
    for operation in group:
        by_loop.setdefault(operation.loop, []).append(operation)
    for loop, operations in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, operations)


def _resolve(operations: list[_Operation]) -> None:
    """Set the results of operations, in the event loop of their callers; futures that were cancelled are skipped."""
    for operation in operations:
        if operation.future.done():
            continue
        if operation.error is not None:
            operation.future.set_exception(operation.error)
        else:
            operation.future.set_result(operation.result)
