"""The side of a job: an engine in a process of its own, as an `Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from palestra.backend.base import FIRST_VERSION
from palestra.backend.channel import Channel
from palestra.backend.engine_worker import place_of
from palestra.backend.errors import error_of
from palestra.backend.typed import typed
from palestra.engine.base import EngineLoad, EngineRequest
from palestra.errors import EngineFailure, PalestraError
from palestra.models.weights import WeightSource
from palestra.types.calls import PolicyVersion, SampledTokens, TokenSequence
from palestra.waiting import cancelled


class WorkerEngine:
    """Implements `Engine` with an engine worker. A channel that ends is the end of the worker: all calls fail."""

    def __init__(self, channel: Channel, cause: Callable[[], Awaitable[str]]) -> None:
        """Begin to receive.

        Args:
            channel: to the worker, which is closed with this object.
            cause: is asked how a worker has died whose end of the channel is closed.
        """
        self._channel, self._cause = channel, cause
        self._numbers = 0
        self._replies: dict[int, asyncio.Queue[list[Any] | PalestraError | None]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._versions: dict[str, PolicyVersion] = {}
        self._load = EngineLoad(waiting=0, running=0)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._receiving = asyncio.create_task(self._receive())

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SampledTokens, None]:
        """Stream a reply; see `Engine.generate`."""
        pieces: asyncio.Queue[list[Any] | PalestraError | None] = asyncio.Queue()
        number = self._sent("generate", request)
        self._replies[number] = pieces
        ended = False
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, PalestraError):
                    ended = True
                    raise piece
                ids, logprobs, version, top = piece
                yield SampledTokens(
                    ids=tuple(ids),
                    logprobs=tuple(logprobs),
                    version=PolicyVersion(*version),
                    top=tuple(tuple((token, logprob) for token, logprob in each) for each in top),
                )
            ended = True
        finally:
            del self._replies[number]
            if not ended and not self._lost.done():
                self._channel.send({"cancel": number})

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Return the log-probability of each token of a prompt but the first; see `Engine.score`."""
        found: list[float] = typed(list[float], await self._call("score", {"policy": policy, "prompt": prompt}), (), "")
        return found

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Replace a policy's weights by those of a file or a folder; see `Engine.sync_weights`."""
        await self._call("sync_weights", {"policy": policy, "version": version, "source": place_of(source)})
        self._versions[policy] = version

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Let requests be sampled from one more policy; see `Engine.add_policy`."""
        place = place_of(source)
        await self._call("add_policy", {"name": name, "like": like, "version": version, "source": place})
        self._versions[name] = version

    async def remove_policy(self, name: str) -> None:
        """Free the memory of a policy; see `Engine.remove_policy`."""
        await self._call("remove_policy", {"name": name})
        self._versions.pop(name, None)

    async def pause(self) -> None:
        """Return when no forward pass runs; none starts until `resume`."""
        await self._call("pause", {})

    async def resume(self) -> None:
        """Let forward passes run again after `pause`."""
        await self._call("resume", {})

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of the weights that a policy is sampled from now."""
        return self._versions.get(policy, FIRST_VERSION)

    def load(self) -> EngineLoad:
        """Return what the worker has reported last, which is a fraction of a second old."""
        return self._load

    async def failure(self) -> str:
        """Return when the worker has failed or died, and say why."""
        return await asyncio.shield(self._lost)

    def lose(self, why: str) -> None:
        """Give the worker up, and fail all its calls; the first reason counts."""
        if self._lost.done():
            return
        self._lost.set_result(why)
        error = EngineFailure(f"an engine worker {why}")
        for pieces in self._replies.values():
            pieces.put_nowait(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._channel.close()

    async def close(self) -> None:
        """Close the channel, with which the worker ends, and fail all calls."""
        self.lose("was closed")
        await cancelled(self._receiving)

    def _sent(self, do: str, given: EngineRequest | Mapping[str, Any]) -> int:
        """Send a call, and return its number."""
        if self._lost.done():
            raise EngineFailure(f"an engine worker {self._lost.result()}")
        self._numbers += 1
        self._channel.send({"id": self._numbers, "do": do, "with": given})
        return self._numbers

    async def _call(self, do: str, given: Mapping[str, Any]) -> Any:
        """Return the answer of a call."""
        number = self._sent(do, given)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self._calls[number]

    async def _receive(self) -> None:
        """Hand out what arrives, until the worker has gone."""
        try:
            async for frame in self._channel.frames():
                for message in frame.header["messages"]:
                    self._take(message)
            self.lose(await self._cause())
        except PalestraError as error:
            self.lose(f"sent what is no message: {error}")

    def _take(self, message: dict[str, Any]) -> None:
        if (load := message.get("load")) is not None:
            waiting, running, used, most, passes, prefilled, sampled = load
            self._load = EngineLoad(
                waiting=waiting,
                running=running,
                kv_bytes_used=used,
                kv_bytes=most,
                passes=passes,
                prefilled_tokens=prefilled,
                sampled_tokens=sampled,
            )
        elif (why := message.get("failed")) is not None:
            self.lose(f"has failed: {why}")
        elif (pieces := self._replies.get(message["id"])) is not None:
            pieces.put_nowait(
                message["piece"] if "piece" in message else error_of(message["error"]) if "error" in message else None
            )
        elif (call := self._calls.get(message["id"])) is not None and not call.done():
            if "error" in message:
                call.set_exception(error_of(message["error"]))
            else:
                call.set_result(message["result"])
