"""Record calls in the run store, or nowhere for calls outside any episode."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Protocol

from palestra.session.context import SessionContext
from palestra.session.prompting import PromptBuilder
from palestra.session.registry import CallRegistry
from palestra.types.calls import Chat


class CallStore(Protocol):
    """The part of the run store that a session writes to: `Calls`, or `NoStore`."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Record a call; the future is done when the call is on disk, even if the client has disconnected.

        Raises (the future):
            EpisodeLeaseExpired, EpisodeEnded: the lease under which the call was made is over.
        """
        ...


class NoStore:
    """Implements `CallStore` for calls outside any episode: nothing is recorded."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Return a future that is done; see `CallStore.append`."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Recorder:
    """Records the calls of a session, and lets later calls continue from those that are on disk."""

    def __init__(
        self, store: CallStore, context: SessionContext, registry: CallRegistry, prompts: PromptBuilder
    ) -> None:
        self._store, self._context = store, context
        self._registry, self._prompts = registry, prompts
        self._over = False

    def close(self) -> None:
        """End the session.

        Calls that are still being written are recorded, but no later call can continue from them.
        """
        self._over = True

    async def record(self, chat: Chat, keys: Mapping[int, Hashable]) -> None:
        """Record a call, and return when it is on disk. Cancelling the caller does not stop the recording.

        Args:
            chat: the call.
            keys: of its messages; see `History.add`.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the lease is over, and nothing of the call is kept.
        """
        written = self._store.append(chat)
        self._registry.recording(chat, written)
        # Added before the callback of `shield`, so that the call is registered when the caller resumes.
        written.add_done_callback(partial(self._written, chat, keys))
        await asyncio.shield(written)

    def _written(self, chat: Chat, keys: Mapping[int, Hashable], written: asyncio.Future[None]) -> None:
        """Run when the commit ends, even if the client is gone, so that a retry returns exactly the committed call."""
        failed = written.cancelled() or written.exception() is not None  # the error is raised where it is awaited
        self._registry.recorded(chat, written, kept=not failed and not self._over)
        if failed:
            return
        self._context.count(chat)
        if not self._over:
            self._prompts.add(chat, keys)
