"""Renewal of leases in the background, exactly while a `with` block is open or a rollout function runs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from palestra.client.episode import Episode
from palestra.errors import PalestraError

log = logging.getLogger("palestra.client")
SHORTEST_SECONDS = 0.1  # between two heartbeats of one episode


def period(episode: Episode) -> float:
    """Return the seconds between two heartbeats, a third of the lease: two may be lost before the lease is."""
    return max(SHORTEST_SECONDS, episode.lease_seconds / 3)


@asynccontextmanager
async def renewed(heartbeat: Callable[[Episode], Awaitable[None]], episode: Episode) -> AsyncIterator[None]:
    """Renew the lease of an episode while the block is open.

    Args:
        heartbeat: sends one heartbeat.
        episode: the claimed episode.
    """

    async def beat() -> None:
        while True:
            await asyncio.sleep(period(episode))
            try:
                await heartbeat(episode)
            except PalestraError as error:
                log.warning("heartbeat of %s: %s", episode.episode_id, error)
                # The lease is lost: the next call of the episode raises the same error where the user sees it.
                if not error.retryable:
                    return

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()


class Heartbeats:
    """Renews the leases of all open blocks in one thread, which starts with the first block."""

    def __init__(self, heartbeat: Callable[[Episode], None]) -> None:
        """Create the renewal without its thread.

        Args:
            heartbeat: sends one heartbeat, without retries: the next beat is the retry.
        """
        self._heartbeat = heartbeat
        self._due: dict[str, tuple[float, Episode]] = {}  # by episode id: the monotonic time of its next heartbeat
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def of(self, episode: Episode) -> Iterator[None]:
        """Renew the lease of an episode while the block is open."""
        with self._changed:
            self._due[episode.episode_id] = time.monotonic() + period(episode), episode
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="palestra-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._due.pop(episode.episode_id, None)

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (episode := self._next()) is not None:
            try:
                self._heartbeat(episode)
            except PalestraError as error:
                if error.retryable:  # the next beat tries again
                    log.info("heartbeat of %s: %s", episode.episode_id, error)
                    continue
                log.warning("heartbeat of %s: %s", episode.episode_id, error)
                with self._changed:  # the lease is lost; the episode's next call raises the same error
                    self._due.pop(episode.episode_id, None)

    def _next(self) -> Episode | None:
        """Wait until a heartbeat is due and return its episode, or None when the client is closed."""
        with self._changed:
            while not self._closed:
                first = min(self._due.values(), key=lambda entry: entry[0], default=None)
                now = time.monotonic()
                if first is not None and first[0] <= now:
                    self._due[first[1].episode_id] = now + period(first[1]), first[1]
                    return first[1]
                self._changed.wait(None if first is None else first[0] - now)
            return None
