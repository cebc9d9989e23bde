"""Where a session leaves its calls: the run store, or nowhere."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from palestra.schemas.records import Chat


class CallRecorder(Protocol):
    """What a session asks of the store."""

    def hold(self, episode_id: str, fence: int) -> AbstractContextManager[None]:
        """The server is at work for this lease, which can't run out meanwhile."""
        ...

    def append_chat(self, chat: Chat) -> asyncio.Future[None]:
        """Record a call; the future is done when it is on disk, also where nobody waits for it any more.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the lease under which it was made is over.
        """
        ...


class NoRecorder:
    """Implements `CallRecorder` for calls outside any episode: there is no lease, and nothing is kept."""

    def hold(self, episode_id: str, fence: int) -> AbstractContextManager[None]:
        """See `CallRecorder`."""
        return nullcontext()

    def append_chat(self, chat: Chat) -> asyncio.Future[None]:
        """See `CallRecorder`."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done
