"""An engine without a model: replies from a function, for tests and for measuring everything but the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from palestra.errors import EngineFailure
from palestra.faults import fault_point
from palestra.inference.draw import uniform
from palestra.schemas.records import Ids, PolicyVersion, SampledTokens, SamplingParams

Script = Callable[[Ids, SamplingParams], Sequence[int]]


def digits_script(length: int, stop_id: int) -> Script:
    """Replies of up to `length` digits as bytes, drawn from the call's seed, then the stop token."""

    def reply(prompt_ids: Ids, sampling: SamplingParams) -> list[int]:
        count = 1 + int(uniform(sampling.seed, 0) * (length - 1))
        return [ord("0") + int(uniform(sampling.seed, i) * 10) for i in range(1, count)] + [stop_id]

    return reply


class ScriptedEngine:
    """Implements `Engine` with a script; every token has logprob -1, and is the most probable one where that is asked.

    Of a call's sampling it obeys `max_tokens`, `stop_ids` and `top_logprobs`; the script gets all of it.
    """

    def __init__(
        self, script: Script, delay_seconds: float = 0.0, piece_tokens: int = 0, piece_delay_seconds: float = 0.0
    ) -> None:
        """A reply comes after `delay_seconds`, in pieces of `piece_tokens` (0: whole) with a delay between them."""
        self._script, self._delay = script, delay_seconds
        self._piece, self._piece_delay = piece_tokens, piece_delay_seconds
        self._versions: dict[str, PolicyVersion] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self.calls = 0
        self.running = 0  # calls that are being answered

    async def generate(self, policy: str, prompt_ids: Ids, sampling: SamplingParams) -> AsyncIterator[SampledTokens]:
        """See `Engine`."""
        await self._running.wait()
        if self._delay:
            await asyncio.sleep(self._delay)
        if self._closed:
            raise EngineFailure("the engine was stopped")
        self.calls += 1
        self.running += 1
        try:
            ids = _until_stop(self._script(prompt_ids, sampling), sampling)
            size = self._piece or max(len(ids), 1)
            for start in range(0, max(len(ids), 1), size):
                if start and self._piece_delay:
                    await asyncio.sleep(self._piece_delay)
                fault_point("during_generation")
                yield self._sampled(policy, ids[start : start + size], sampling)
        finally:
            self.running -= 1

    def _sampled(self, policy: str, ids: tuple[int, ...], sampling: SamplingParams) -> SampledTokens:
        top = tuple(_top(token, sampling.top_logprobs) for token in ids) if sampling.top_logprobs else ()
        return SampledTokens(ids=ids, logprobs=(-1.0,) * len(ids), version=self.version(policy), top=top)

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

    async def failure(self) -> str:
        """See `Engine`."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never  # a script has nothing that could break

    async def close(self) -> None:
        """See `Engine`."""
        self._closed = True
        self._running.set()


def _until_stop(reply: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    ids = tuple(reply)[: sampling.max_tokens]
    ends = [place for place, token in enumerate(ids) if token in sampling.stop_ids]
    return ids[: ends[0] + 1] if ends else ids


def _top(token: int, number: int) -> tuple[tuple[int, float], ...]:
    """The token, and those with the next ids, each a little less probable."""
    return tuple((token + k, -1.0 - k) for k in range(number))
