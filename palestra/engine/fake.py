"""`kind = "fake"`: an engine without a model, for tests and for measuring everything but the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from palestra.config.engine import OF_KIND, PooledEngineConfig
from palestra.config.section import Positive
from palestra.engine.base import EngineLoad, EngineRequest, uniforms
from palestra.engine.driver import EngineDriver, EngineJob, LoadedEngine, byte_policies
from palestra.errors import EngineFailure
from palestra.faults import fault_point
from palestra.models.weights import WeightSource
from palestra.types.calls import FIRST_VERSION, Ids, PolicyVersion, SampledTokens, SamplingParams, TokenSequence

Script = Callable[[Ids, SamplingParams], Sequence[int]]


def digits_script(length: int, stop_id: int) -> Script:
    """Return a script of replies with random digits, drawn from the call's seed, and the stop token. `length` includes
    the stop token.
    """

    def reply(prompt_ids: Ids, sampling: SamplingParams) -> list[int]:
        count = 1 + int(uniforms(sampling.seed, range(1))[0] * (length - 1))
        return [ord("0") + int(drawn * 10) for drawn in uniforms(sampling.seed, range(1, count))] + [stop_id]

    return reply


class FakeEngine:
    """An `Engine` that answers from a script, for any policy; every token has logprob -1 and is the most probable one.

    It honours `max_tokens`, `stop_ids` and `top_logprobs`; other sampling parameters are up to the script.
    """

    def __init__(
        self, script: Script, delay_seconds: float = 0.0, piece_tokens: int = 0, piece_delay_seconds: float = 0.0
    ) -> None:
        """Create the engine. `script` returns the ids of a reply for a prompt [P] and its sampling parameters.
        `delay_seconds` pass before the first part; parts have `piece_tokens`, 0: the whole reply.
        """
        self._script, self._delay = script, delay_seconds
        self._piece, self._piece_delay = piece_tokens, piece_delay_seconds
        self._versions: dict[str, PolicyVersion] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self.calls = 0  # requests that were answered, or are being answered
        self.running = 0  # requests that are being answered
        self._waiting = self._sampled_tokens = 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[SampledTokens]:
        """Stream a reply; see `Engine.generate`."""
        self._waiting += 1
        try:
            await self._running.wait()
            if self._delay:
                await asyncio.sleep(self._delay)
        finally:
            self._waiting -= 1
        if self._closed:
            raise EngineFailure("the engine was stopped")
        self.calls += 1
        self.running += 1
        number = request.sampling.top_logprobs
        try:
            ids = tuple(self._script(request.prompt.ids, request.sampling))[: request.sampling.max_tokens]
            if request.sampling.stop_ids:
                ids = _until_stop(ids, request.sampling.stop_ids)
            size = self._piece or max(len(ids), 1)
            for start in range(0, max(len(ids), 1), size):
                if start and self._piece_delay:
                    await asyncio.sleep(self._piece_delay)
                fault_point("during_generation")
                piece = ids[start : start + size]
                self._sampled_tokens += len(piece)
                top = tuple(_top(token, number) for token in piece) if number else ()
                yield SampledTokens(
                    ids=piece, logprobs=(-1.0,) * len(piece), version=self.version(request.policy), top=top
                )
        finally:
            self.running -= 1

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Return -1 for each prompt token but the first."""
        return [-1.0] * (len(prompt.ids) - 1)

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Set the version; there are no weights."""
        self._versions[policy] = version

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Add a policy with its version; there are no weights."""
        self._versions[name] = version

    async def remove_policy(self, name: str) -> None:
        """Remove a policy."""
        self._versions.pop(name, None)

    async def pause(self) -> None:
        """Finish the running forward pass; none starts until `resume`."""
        self._running.clear()

    async def resume(self) -> None:
        """Allow forward passes again after `pause`."""
        self._running.set()

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's weights."""
        return self._versions.get(policy, FIRST_VERSION)

    def load(self) -> EngineLoad:
        """Return waiting and running requests, and the counters of `/metrics`."""
        return EngineLoad(waiting=self._waiting, running=self.running, sampled_tokens=self._sampled_tokens)

    async def failure(self) -> str:
        """Wait until the engine fails, and return the reason in one line."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never  # a script has nothing that could break

    async def close(self) -> None:
        """Fail open requests, and stop the engine."""
        self._closed = True
        self._running.set()


def _until_stop(ids: tuple[int, ...], stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Return a reply up to its first stop token."""
    for place, token in enumerate(ids):
        if token in stop_ids:
            return ids[: place + 1]
    return ids


def _top(token: int, number: int) -> tuple[tuple[int, float], ...]:
    """Return the token and its successors by id, each a little less probable."""
    return tuple((token + k, -1.0 - k) for k in range(number))


class FakeEngineConfig(PooledEngineConfig):
    """`kind = "fake"`: digits that follow from the seed, without a model; for tests."""

    has_model: ClassVar[bool] = False

    kind: Literal["fake"] = Field("fake", description=OF_KIND)
    delay_seconds: float = Field(0.0, ge=0, description="Time that the engine takes for a reply, in seconds.")
    reply_tokens: Positive = Field(32, description="Longest reply, in tokens.")


class FakeDriver(EngineDriver[FakeEngineConfig]):
    """An engine without a model, for tests: neither torch nor transformers is imported."""

    section = FakeEngineConfig

    def load(self, job: EngineJob, table: FakeEngineConfig) -> LoadedEngine:
        """Return an engine that replies with digits."""
        from palestra.renderers import ByteTokenizer

        script = digits_script(table.reply_tokens, ByteTokenizer().eos_token_id)
        return LoadedEngine(FakeEngine(script, table.delay_seconds), byte_policies(job.config))
