"""Arithmetic in threads of its own.

OpenMP keeps a pool of threads for every thread that has computed in parallel, and when all pools together are larger
than the machine, their threads stop waiting actively for one another: a small product then takes nearly twice as long.
So whatever computes now and then does it in a new thread, with which its pool ends; only the engine keeps one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from palestra.models.causal_lm import set_threads

T = TypeVar("T")


async def in_new_thread(work: Callable[[], T], name: str, threads: int | None = None) -> T:
    """The result of `work`, which runs in a new thread with so many threads for arithmetic (None: all cores).

    What has begun is finished, also where nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(function: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(lambda: None if done.done() else function())
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return

    def run() -> None:
        try:
            set_threads(threads)
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            problem = error
            tell(lambda: done.set_exception(problem))
        else:
            tell(lambda: done.set_result(result))

    threading.Thread(target=run, name=name).start()
    return await done
