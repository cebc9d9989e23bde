"""Adapters on the disk that an engine samples from: some are loaded, and others are when they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from palestra.engine.base import Engine

LoadAdapter = Callable[[str], Awaitable[None]]  # adds an adapter to the engine as a policy of the given name


@dataclass(slots=True, eq=False)
class _Loaded:
    """An adapter that the engine has, or is getting."""

    ready: asyncio.Future[None]
    users: int = 0


class AdapterCache:
    """The adapters loaded in an engine, with LRU eviction.

    Uses begin in the order of the requests. If all loaded adapters are in use, the next adapter waits for the first
    free one, and later uses wait behind it, so no adapter waits longer than the replies that began before it.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine, self.most = engine, most
        self._loaded: dict[str, _Loaded] = {}  # by the engine's policy, in the order in which they were used last
        self._leaving: dict[str, asyncio.Task[None]] = {}  # which the engine may still have
        self._turn = asyncio.Lock()  # fair: it is given in the order in which it was asked for
        self._freed = asyncio.Event()
        self.loads = 0

    @property
    def names(self) -> list[str]:
        """Return the policies that are loaded or loading, least recently used first."""
        return list(self._loaded)

    @contextlib.asynccontextmanager
    async def loaded(self, name: str, load: LoadAdapter) -> AsyncIterator[None]:
        """Hold an adapter loaded while the block is open. `load`: called with the name if the adapter is not loaded;
        its error is raised.
        """
        async with self._turn:
            known = self._loaded.pop(name, None)
            if known is None:
                while (leaving := self._leaving.get(name)) is not None:  # else the engine would have it already
                    await asyncio.wait((leaving,))
                await self._free_capacity()
                known = _Loaded(asyncio.ensure_future(load(name)))
                known.ready.add_done_callback(partial(self._came, name, known))
                self.loads += 1
            self._loaded[name] = known
            known.users += 1
        try:
            await asyncio.shield(known.ready)
            yield
        finally:
            known.users -= 1
            self._freed.set()

    async def remove(self, name: str) -> None:
        """Free the memory of an adapter if it is loaded or loading; requests that sample from it fail."""
        if (known := self._loaded.pop(name, None)) is not None:
            # A task of its own: a request that made room may be cancelled, and the engine would keep the adapter.
            self._leaving[name] = asyncio.create_task(self._remove(name, known))
        if (leaving := self._leaving.get(name)) is not None:
            await asyncio.shield(leaving)

    async def _remove(self, name: str, known: _Loaded) -> None:
        """Take an adapter from the engine."""
        try:
            await asyncio.wait((known.ready,))  # else the engine would get the adapter after it was removed, for good
            await self._engine.remove_policy(name)
        finally:
            del self._leaving[name]
            self._freed.set()

    async def _free_capacity(self) -> None:
        """Return when one more adapter may be loaded."""
        while len(self._loaded) + len(self._leaving) >= self.most:
            idle = next((name for name, one in self._loaded.items() if not one.users and one.ready.done()), None)
            if idle is not None:
                await self.remove(idle)
            else:
                self._freed.clear()
                await self._freed.wait()

    def _came(self, name: str, loaded: _Loaded, ready: asyncio.Future[None]) -> None:
        """Forget an adapter that could not be loaded."""
        failed = ready.cancelled() or ready.exception() is not None
        if failed and self._loaded.get(name) is loaded:
            del self._loaded[name]
        self._freed.set()
