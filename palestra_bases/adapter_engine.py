"""The engine of a base server for its jobs: adapters that are never trained are loaded when they are sampled from."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from palestra.engine.base import Engine, EngineLoad, EngineRequest
from palestra.errors import ConfigError
from palestra.models.weights import WeightSource
from palestra.types.calls import FIRST_VERSION, PolicyVersion, SampledTokens, TokenSequence
from palestra_bases.adapter_cache import AdapterCache, LoadAdapter


class AdapterEngine:
    """An `Engine` over another engine, which has only some of the adapters loaded at a time.

    Trained policies and the base itself are always loaded.
    """

    def __init__(self, engine: Engine, cache: AdapterCache) -> None:
        """Begin without adapters.

        Args:
            cache: loads adapters into the engine; may be shared.
        """
        self._engine, self._cache = engine, cache
        self._loads: dict[str, LoadAdapter] = {}  # of policies that need not be in memory

    async def add_adapter(self, name: str, load: LoadAdapter) -> None:
        """Add an adapter that does not change, of version 0.0; load it once as a check."""
        async with self._cache.loaded(name, load):
            self._loads[name] = load

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SampledTokens, None]:
        """Stream a reply, after loading the adapter if necessary; see `Engine.generate`."""
        async with self._having(request.policy):
            pieces = self._engine.generate(request)
            async with contextlib.aclosing(pieces) as reply:  # type: ignore[type-var]  # an async generator
                async for piece in reply:
                    yield piece

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Return the log-probability of each prompt token but the first; see `Engine.score`."""
        async with self._having(policy):
            return await self._engine.score(policy, prompt)

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Replace the weights of a trained policy; see `Engine.sync_weights`."""
        if policy in self._loads:
            raise ConfigError(f"{policy} is never trained, and keeps its weights")
        await self._engine.sync_weights(policy, version, source)

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Add a policy; see `Engine.add_policy`."""
        if like not in self._loads:
            await self._engine.add_policy(name, like, version, source)
        elif source is not None:
            raise ConfigError(f"{like} is never trained, and there are no other weights of it")
        else:
            await self.add_adapter(name, self._loads[like])

    async def remove_policy(self, name: str) -> None:
        """Free the memory of a policy; see `Engine.remove_policy`."""
        if self._loads.pop(name, None) is not None:
            await self._cache.remove(name)
        else:
            await self._engine.remove_policy(name)

    async def pause(self) -> None:
        """Begin no forward pass until `resume`; see `Engine.pause`."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Let forward passes run again; see `Engine.resume`."""
        await self._engine.resume()

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's weights; see `Engine.version`."""
        return FIRST_VERSION if policy in self._loads else self._engine.version(policy)

    def load(self) -> EngineLoad:
        """Return the engine's load; see `Engine.load`."""
        return self._engine.load()

    async def failure(self) -> str:
        """Wait until the engine fails, and return the reason; see `Engine.failure`."""
        return await self._engine.failure()

    async def close(self) -> None:
        """Stop the engine; see `Engine.close`."""
        await self._engine.close()

    @contextlib.asynccontextmanager
    async def _having(self, policy: str) -> AsyncIterator[None]:
        """Have a policy in the engine inside of the block."""
        load = self._loads.get(policy)
        if load is None:
            yield
            return
        async with self._cache.loaded(policy, load):
            yield
