"""Threads: a new one for each piece of a job's work, and a pool for requests.

A job's work does not use a pool, for two reasons. Work that hangs would occupy the pool forever. And OpenMP keeps a
pool of threads for every thread that has computed in parallel: when all of these together exceed the machine's cores,
they stop spinning, and a small product takes nearly twice as long. OpenMP's threads end with the thread that they
belong to. So work that computes only now and then gets a new thread each time; only the engine keeps its thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
SHORT_TURN_SECONDS = 0.0005  # Python's are 5 ms
FREED_AT_ONCE = 64  # episodes, in about a millisecond
END_SECONDS = 5.0  # limit for ending the tasks of an event loop that is closed
REQUEST_THREADS = 2  # more would only take the interpreter's lock from the event loop more often


async def in_thread(work: Callable[[], T], name: str = "palestra-work", daemon: bool = True) -> T:
    """Run a blocking function in a new thread and return its result.

    The function runs to its end, even if the caller is cancelled.

    Args:
        work: sees the context variables of the caller.
        name: of the thread, for debuggers and logs.
        daemon: whether the process may end while the function is running.

    Raises:
        BaseException: any exception of `work`; StopIteration and exits of the interpreter become a RuntimeError.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():  # cancelled with its caller, perhaps
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, context.run(work))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            outcome = (done.set_exception, _raisable(error))
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:  # the loop is closed, so no task waits for the result any more
            return

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return await done


async def freed(*lists: list[Any]) -> None:
    """Empty lists of many objects in a thread, a few objects at a time.

    A list that is dropped as a whole is freed without a break, and all threads wait meanwhile.
    """

    def free() -> None:
        for items in lists:
            while items:
                del items[-FREED_AT_ONCE:]

    await in_thread(free)


@contextmanager
def short_turns() -> Iterator[None]:
    """Let threads take shorter turns inside the block, because one of them computes for long in Python.

    A thread that writes to a database gives its turn away with every statement, and gets it back only after the turn of
    the one that computes: a commit would wait for dozens of them.
    """
    _turns.begin()
    try:
        yield
    finally:
        _turns.end()


class _Turns:
    """Counts the open blocks of all event loops, because the length of a turn belongs to the process."""

    def __init__(self) -> None:
        self._lock, self._open, self._usual = threading.Lock(), 0, 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._open:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(SHORT_TURN_SECONDS)
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                sys.setswitchinterval(self._usual)


_turns = _Turns()


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling `function` gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - that of an object is wanted here
    )


async def call(function: Callable[[], Any], name: str = "palestra-work", *, blocking: bool = True) -> Any:
    """Return the result of a user's function: on the event loop if it is asynchronous, else from a new thread.

    Args:
        function: without parameters; a `functools.partial` of an asynchronous function counts as asynchronous.
        blocking: whether a synchronous function may block; otherwise it is called on the event loop.
    """
    found = await in_thread(function, name) if blocking and not is_async(function) else function()
    # A function that is not asynchronous may still return a coroutine, such as a method that calls one that is.
    return await found if inspect.isawaitable(found) else found


def _raisable(error: BaseException) -> BaseException:
    """Return an error that a future can hold (no StopIteration), and that does not end the program when raised."""
    return error if isinstance(error, Exception) and not isinstance(error, StopIteration) else RuntimeError(repr(error))


class CallerGone(Exception):
    """Raised in work of a `WorkPool` whose caller was cancelled, so that the thread becomes free early."""


class WorkPool:
    """A few threads for parts of requests that would block the event loop, such as parsing a large body.

    They are not asyncio's default executor, so that long requests never delay a job's own work. Work of a cancelled
    caller is dropped: before it starts if it is still queued, otherwise when it calls `check_wanted`.
    """

    def __init__(self, threads: int = REQUEST_THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, "palestra-request")

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` with the arguments in one of the pool's threads, and return its result.

        If the caller is cancelled, `check_wanted` raises `CallerGone` in the function.
        """
        abandoned = threading.Event()

        def work() -> T:
            _current.abandoned = abandoned
            try:
                return function(*args, **kwargs)
            finally:
                _current.abandoned = None

        future = self._threads.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            abandoned.set()
            raise
        finally:
            # The future holds what was raised, which holds this frame, and with it the request: such a circle would
            # stay in memory until the garbage collector runs.
            del future

    def close(self) -> None:
        """Stop the threads after their present work; queued work is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Current(threading.local):
    abandoned: threading.Event | None = None


_current = _Current()


def check_wanted() -> None:
    """Raise `CallerGone` if this thread's caller was cancelled. Call it in long loops.

    No effect outside `WorkPool.run`.
    """
    if _current.abandoned is not None and _current.abandoned.is_set():
        raise CallerGone


@contextmanager
def own_loop(name: str) -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread while the block is open.

    Args:
        name: of the thread, for debuggers and logs.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_end_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end_others() -> None:
    """End all other tasks of this event loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=END_SECONDS)


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that runs on another event loop; it is cancelled with the caller."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
