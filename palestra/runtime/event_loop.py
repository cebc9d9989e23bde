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
    """Make garbage collection rare, for a process that only runs a job."""
    gc.freeze()  # objects of imported modules are not examined again
    gc.set_threshold(50_000, 20, 10)  # recorded calls are many small objects, hardly any in a cycle
