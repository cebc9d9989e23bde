"""Work that other threads give to an engine's own thread: done in order, and refused once that thread has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from palestra.errors import EngineFailure

Command = Callable[[], None]
REST_SECONDS = 0.02  # an agent's next call often comes sooner than that; a training step takes much longer


class CommandQueue:
    """A queue of commands from any thread to one thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unsettled: set[Future[None]] = set()
        self._awaiting_failure: set[Future[str]] = set()
        self._closed: str | None = None  # why no command is taken any more
        self._failure: str | None = None  # the same reason, where the thread did not end in good order

    def put(self, command: Command) -> None:
        """Queue a command for the engine's thread."""
        with self._lock:
            self.check_open()
            self._queue.put(command)

    def check_open(self) -> None:
        """Raise EngineFailure if the thread has ended."""
        if self._closed is not None:
            raise EngineFailure(self._closed)

    def future(self) -> Future[None]:
        """Return a future for a command: the command sets its result, or `close` sets an error."""
        future: Future[None] = Future()
        self._unsettled.add(future)
        future.add_done_callback(self._unsettled.discard)
        return future

    def failure(self) -> Future[str]:
        """Return a future of the reason why the thread fails; it stays pending if the thread ends normally."""
        future: Future[str] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_result(self._failure)
            elif self._closed is None:
                self._awaiting_failure.add(future)
                future.add_done_callback(self._awaiting_failure.discard)  # where its caller is cancelled
        return future

    def run(self, wait: bool, rest: Callable[[], object] = lambda: None) -> None:
        """Run the queued commands; with `wait`, block until there is one. `rest` is called when no command comes for
        `REST_SECONDS`.
        """
        if wait:
            try:
                command = self._queue.get(timeout=REST_SECONDS)
            except queue.Empty:
                rest()
                command = self._queue.get()
            command()
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            command()

    def close(self, why: str, failed: bool) -> None:
        """Refuse further commands, fail all pending futures, and run what was queued before. `failed`: the thread ended
        because of a defect, which `failure` then reports.
        """
        with self._lock:
            self._closed, self._failure = why, why if failed else None
            awaiting = list(self._awaiting_failure)
        for future in list(self._unsettled):
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineFailure(why))
        self.run(wait=False)
        for reason in awaiting if failed else ():
            if reason.set_running_or_notify_cancel():
                reason.set_result(why)
