"""Where a session leaves its calls: the run store's `Calls`, or nowhere."""

from __future__ import annotations

import asyncio
from typing import Protocol

from palestra.schemas.records import Chat


class CallRecorder(Protocol):
    """Records the calls of a session."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Record a call; the future is done when the call is on disk, even if its caller is gone by then.

        Raises (the future):
            EpisodeLeaseExpired, EpisodeEnded: the lease under which it was made is over.
        """
        ...


class NoRecorder:
    """Implements `CallRecorder` for calls outside any episode: nothing is kept."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Return a future that is done."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done
