"""Threads for one piece of work each.

Not from a pool, for two reasons. Work that hangs for ever would take a place in a pool for ever. And OpenMP keeps
threads of its own for every thread that has computed in parallel: when all of these together are more than the machine
has cores, they stop waiting actively for one another, and a small product takes nearly twice as long. They end with the
thread that they belong to, so whatever computes now and then does it in a new one; only the engine keeps its thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], name: str = "palestra-work", daemon: bool = True) -> T:
    """The result of something that blocks, from a new thread; it is finished, also where nobody waits for it any more.

    Args:
        work: what to do. It sees the context variables of the caller.
        name: of the thread.
        daemon: whether the process may end before the work has.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():  # whoever waited may have given up
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, context.run(work))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            outcome = (done.set_exception, _raisable(error))
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return await done


def _raisable(error: BaseException) -> BaseException:
    """A future can't hold StopIteration, and an exit in a thread must not end the program."""
    return error if isinstance(error, Exception) and not isinstance(error, StopIteration) else RuntimeError(repr(error))
