"""Waits for several awaitables, without leaving tasks running or losing errors.

`race` waits for the first of several, `together` for all of them or the first failure, and `cancelled` ends tasks
started elsewhere. All three await what they cancel, so that no task outlives the block that started it.
`ordinary_errors` stands around code of a user, which must end no more than its own call. `LoggedOnce` stands around
work that is tried again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from palestra.errors import PalestraError

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Winner(Generic[T]):
    """The first awaitable of a race that was done.

    Attributes:
        index: argument of `race`, from 0.
    """

    index: int
    result: T


async def race(*entrants: Awaitable[T]) -> Winner[T]:
    """Await several awaitables until the first of them is done, and cancel the others.

    The others have ended when `race` returns or raises, even if the caller is cancelled. Wrap an awaitable that must
    not be cancelled in `asyncio.shield`. If several are done in the same iteration of the event loop, the first
    argument wins.
    """
    tasks = [asyncio.ensure_future(entrant) for entrant in entrants]
    try:
        done = await _wait_then_cancel(tasks, asyncio.FIRST_COMPLETED)
        index = next(number for number, task in enumerate(tasks) if task in done)
        tasks.insert(0, tasks.pop(index))
        _raise_one(tasks)
        return Winner(index, tasks[0].result())
    finally:
        # An error holds this frame. If the frame held the tasks, which hold the error, the circle would keep all that
        # they work on, perhaps a whole request, until the garbage collector runs.
        entrants, tasks, done = (), [], set()


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines concurrently until all are done, or until one fails; then cancel the others.

    Results are in order. A single coroutine runs in the caller's own task.
    """
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done = await _wait_then_cancel(tasks, asyncio.FIRST_EXCEPTION)
        # Tasks that were done before the others were cancelled come first: one of them is the cause.
        _raise_one(sorted(tasks, key=lambda task: task not in done))
        return [task.result() for task in tasks]
    finally:
        tasks, done = [], set()  # see `race`


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until all of them have ended, even if the caller is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    try:
        await _wait_then_cancel(tasks, asyncio.ALL_COMPLETED)
        _raise_one(tasks)
    finally:
        tasks = ()  # see `race`


async def _wait_then_cancel(tasks: Collection[asyncio.Future[Any]], until: str) -> set[asyncio.Future[Any]]:
    """Wait like `asyncio.wait`; then cancel the rest, and wait for it too."""
    interrupted: asyncio.CancelledError | None = None
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=until)
    except asyncio.CancelledError as error:
        interrupted = error
    done = {task for task in tasks if task.done()}
    pending = set(tasks) - done
    for task in pending:
        task.cancel()
    while pending:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            interrupted = error
        pending = {task for task in pending if not task.done()}
    if interrupted is None:
        return done
    _log_errors(tasks)
    try:
        raise interrupted
    finally:
        del interrupted, tasks, done  # see `race`


def _raise_one(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Raise the first error of tasks that have ended, if there is one, and log the others."""
    failed = [task for task in tasks if _failed(task)]
    try:
        _log_errors(failed[1:])
        if failed:
            failed[0].result()
    finally:
        failed, tasks = [], ()  # see `race`


def _log_errors(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Log errors of ended tasks that are not raised; Palestra's own, which may be of many tasks, without traceback."""
    for task in tasks:
        if _failed(task):
            error = task.exception()
            traceback = None if isinstance(error, PalestraError) else error
            log.error("failed beside something else that ended: %r", error, exc_info=traceback)


def _failed(task: asyncio.Future[Any]) -> bool:
    """Return whether a task that has ended raised an error. A cancelled task has not failed."""
    return not task.cancelled() and task.exception() is not None


class LoggedOnce:
    """Logs why work that is repeated fails now (a full disk, perhaps): once, until it succeeds or fails otherwise."""

    def __init__(self, logger: logging.Logger, text: str, of: type[Exception] = PalestraError) -> None:
        """Log errors `of` a type, with their own types if they may be any; `text` stands before each."""
        self._log, self._text, self._of, self._said = logger, text, of, ""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Try the work once, in the block."""
        try:
            yield
            self._said = ""
        except self._of as error:
            said = str(error) if self._of is PalestraError else f"{type(error).__name__}: {error}"
            if said != self._said:
                self._said = said
                self._log.error("%s: %s", self._text, said)


class ordinary_errors:
    """Context manager that turns what a user's code raises into an `Exception`.

    `SystemExit` (argparse raises it) would end the process. A `CancelledError` ends its task without a word, also if
    nobody cancelled the task: code raises it that awaits a task which it has cancelled itself.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and (ordinary := as_ordinary(error)) is not error:
            raise ordinary from error


def as_ordinary(error: BaseException) -> BaseException:
    """Return the `RuntimeError` for a `SystemExit` or a stray `CancelledError`, and any other error as it is."""
    if isinstance(error, SystemExit):
        return RuntimeError(f"the code ended with SystemExit({error.code!r})")
    if isinstance(error, asyncio.CancelledError) and not _being_cancelled():
        return RuntimeError("the code raised CancelledError, but nobody had cancelled it")
    return error


def _being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0
