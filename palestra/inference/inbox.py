"""What other threads ask of an engine's own: done in order, and refused once that thread is over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from palestra.errors import EngineFailure

Work = Callable[[], None]


class Inbox:
    """Any thread puts work in; one takes it out."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._promises: set[Future[None]] = set()  # that are not kept yet
        self._waiting: list[Future[str]] = []  # to hear of a failure
        self._closed: str | None = None  # why
        self._failure: str | None = None  # likewise, where the thread did not end in good order

    def put(self, work: Work) -> None:
        """Have it done.

        Raises:
            EngineFailure: nothing is done any more.
        """
        with self._lock:
            if self._closed is not None:
                raise EngineFailure(self._closed)
            self._queue.put(work)

    def promise(self) -> Future[None]:
        """For work whose caller waits: whoever does it sets a result; `close` sets an error."""
        promise: Future[None] = Future()
        self._promises.add(promise)
        promise.add_done_callback(self._promises.discard)
        return promise

    def failure(self) -> Future[str]:
        """Has a result when the thread has failed, and never where it ends in good order."""
        found: Future[str] = Future()
        with self._lock:
            if self._failure is not None:
                found.set_result(self._failure)
            elif self._closed is None:
                self._waiting.append(found)
        return found

    def take(self, wait: bool) -> None:
        """Do what is there; with `wait`, at least one piece of work, when it comes."""
        while True:
            try:
                self._queue.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def close(self, why: str, failed: bool) -> None:
        """Refuse whatever comes from now on; what was put in before is done, but for what was promised: that fails."""
        with self._lock:
            self._closed, self._failure = why, why if failed else None
            waiting, self._waiting = self._waiting, []
        for promise in list(self._promises):
            if promise.set_running_or_notify_cancel():
                promise.set_exception(EngineFailure(why))
        self.take(wait=False)
        for future in waiting if failed else ():
            if future.set_running_or_notify_cancel():
                future.set_result(why)
