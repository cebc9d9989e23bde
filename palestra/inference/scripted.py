"""An engine without a model: replies from a function, for tests and for measuring everything but the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from palestra.errors import EngineFailure
from palestra.inference.draw import uniform
from palestra.schemas.records import Ids, PolicyVersion, SampledTokens, Sampling

Script = Callable[[Ids, Sampling], Sequence[int]]


def digits_script(length: int, stop_id: int) -> Script:
    """Replies of up to `length` digits as bytes, drawn from the call's seed, then the stop token."""

    def reply(prompt_ids: Ids, sampling: Sampling) -> list[int]:
        count = 1 + int(uniform(sampling.seed, 0) * (length - 1))
        return [ord("0") + int(uniform(sampling.seed, i) * 10) for i in range(1, count)] + [stop_id]

    return reply


class ScriptedEngine:
    """Implements `Engine` with a script; every token has logprob -1."""

    def __init__(self, script: Script, delay_seconds: float = 0.0) -> None:
        self._script, self._delay = script, delay_seconds
        self._versions: dict[str, PolicyVersion] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self.calls = 0

    async def generate(self, policy: str, prompt_ids: Ids, sampling: Sampling) -> AsyncIterator[SampledTokens]:
        """See `Engine`."""
        await self._running.wait()
        if self._delay:
            await asyncio.sleep(self._delay)
        if self._closed:
            raise EngineFailure("the engine was stopped")
        self.calls += 1
        ids = tuple(self._script(prompt_ids, sampling))[: sampling.max_tokens]
        yield SampledTokens(ids=ids, logprobs=(-1.0,) * len(ids), version=self.version(policy))

    async def update_weights(self, policy: str, version: PolicyVersion, weights: Any) -> None:
        """See `Engine`."""
        self._versions[policy] = version

    async def pause(self) -> None:
        """See `Engine`."""
        self._running.clear()

    async def resume(self) -> None:
        """See `Engine`."""
        self._running.set()

    def version(self, policy: str) -> PolicyVersion:
        """See `Engine`."""
        return self._versions.get(policy, PolicyVersion(0, 0))

    async def close(self) -> None:
        """See `Engine`."""
        self._closed = True
        self._running.set()
