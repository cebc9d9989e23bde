"""Work that holds its caller until it is done, and what SIGINT and SIGTERM do meanwhile."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is entered, SIGINT and SIGTERM ask for a stop; `raise_received` then ends the caller's script.

    The handlers are those of Python, not of an event loop, so they also work where the caller blocks inside of a
    running one (a notebook). Outside of the main thread there are none: Python gives signals to the main thread only.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        """`stop` asks the work to end; it returns False if nothing has to be waited for."""
        self._stop = stop
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python

    def raise_received(self, said: str) -> None:
        """End the script if a signal came: KeyboardInterrupt after SIGINT, and exit code 143 after SIGTERM.

        Raises:
            KeyboardInterrupt, SystemExit: which no `except Exception` of a script takes for a failed step.
        """
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt(said)
        if self.received is not None:
            raise SystemExit(128 + self.received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if not self._stop() or again:  # who asks twice does not want to wait
            self.raise_received("interrupted before anything could be saved" if not again else "interrupted twice")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine here, or in a thread of its own where an event loop is running (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    done: Future[T] = Future()

    def body() -> None:
        try:
            done.set_result(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            done.set_exception(error)

    threading.Thread(target=body, name="palestra-foreground", daemon=True).start()  # a second Ctrl-C leaves it behind
    return done.result()
