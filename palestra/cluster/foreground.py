"""Work that blocks its caller until it is done, and the handling of SIGINT and SIGTERM meanwhile."""

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
    """A context manager in which SIGINT and SIGTERM ask for a stop; `raise_received` then ends the caller's script.

    The handlers are Python's, not those of an event loop, so that they also work if the caller blocks inside of a
    running loop (a notebook). Outside of the main thread there are none, because Python delivers signals to the main
    thread only.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        """Prepare the handlers, which are set while the block is open.

        Args:
            stop: asks the work to end; returns False if there is nothing to wait for.
        """
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
        """End the script if a signal was received: KeyboardInterrupt after SIGINT, exit code 143 after SIGTERM.

        Args:
            said: text of the KeyboardInterrupt.

        Raises:
            KeyboardInterrupt, SystemExit: not subclasses of Exception, so that no handler in a script takes them for a
                failed step.
        """
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt(said)
        if self.received is not None:
            raise SystemExit(128 + self.received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if not self._stop() or again:  # a second signal does not wait
            self.raise_received("interrupted before anything could be saved" if not again else "interrupted twice")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine here, or in a thread of its own if an event loop is running here (a notebook)."""
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

    threading.Thread(
        target=body, name="palestra-foreground", daemon=True
    ).start()  # daemon: a second Ctrl-C ends the process without it
    return done.result()
