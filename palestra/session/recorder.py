"""Writes calls down: in the run store, or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Protocol

from palestra.schemas.records import Chat
from palestra.session.context import SessionContext
from palestra.session.prompting import PromptBuilder
from palestra.session.registry import CallRegistry


class CallStore(Protocol):
    """Where a session leaves its calls: the run store's `Calls`, or nowhere."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Record a call; the future is done when the call is on disk, even if its caller is gone by then.

        Raises (the future):
            EpisodeLeaseExpired, EpisodeEnded: the lease under which it was made is over.
        """
        ...


class NoStore:
    """Implements `CallStore` for calls outside any episode: nothing is kept."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """See `CallStore`."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Recorder:
    """Records the calls of a session, and makes what is on disk part of what later calls can go on from."""

    def __init__(
        self, store: CallStore, context: SessionContext, registry: CallRegistry, prompts: PromptBuilder
    ) -> None:
        self._store, self._context = store, context
        self._registry, self._prompts = registry, prompts
        self._over = False

    def close(self) -> None:
        """End the session: what is still being written is recorded, and not remembered here."""
        self._over = True

    async def record(self, chat: Chat, keys: Mapping[int, Hashable]) -> None:
        """Record a call; return when it is on disk.

        A caller that is cancelled meanwhile does not keep the call from being recorded.

        Args:
            chat: the call.
            keys: see `History.add`.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the lease is over, and nothing of the call is kept.
        """
        written = self._store.append(chat)
        self._registry.recording(chat, written)
        # Before `shield` adds its own callback: the call is remembered when the caller, which waits for it, resumes.
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
