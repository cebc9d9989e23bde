"""Processes that stand still at a fault point: which they are, and how all but one of them are released."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import psutil

Processes = Callable[[], Iterable[psutil.Process]]


def stopped(processes: Processes) -> Iterator[psutil.Process]:
    """Yield those of some processes that stand still; some may end meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    yield process


@contextlib.contextmanager
def others_continue(processes: Processes, victim: psutil.Process | None, every_seconds: float) -> Iterator[None]:
    """Release all processes but one, whenever they meet the point, while the block is open.

    Args:
        processes: returns the present ones.
        victim: is left as it is; None: all are released.
        every_seconds: between two looks.
    """
    over = threading.Event()

    def release() -> None:
        while not over.wait(every_seconds):
            for process in stopped(processes):
                if process != victim:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
