"""The event loop of a process or thread that runs a job, and its garbage collection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, on the faster uvloop, for threads and processes that serve."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def tune_gc() -> None:
    """Make pauses of garbage collection short and those of all objects rare, for a process that only runs a job.

    A collection stops all threads for the time that it takes to examine its objects, and recorded calls are many small
    objects, hardly any in a cycle: so few are examined at a time, and hardly ever those that were found alive twice.
    """
    gc.freeze()  # objects of imported modules are not examined again
    gc.set_threshold(5_000, 1, 2_000)
