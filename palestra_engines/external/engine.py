"""An engine whose models are in another project's servers, one server for each policy."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import cast

from palestra.engine.base import EngineLoad, EngineRequest, check_prompt, check_sampling
from palestra.errors import EngineFailure, InvalidRequest, ModelError, PalestraError
from palestra.faults import fault_point
from palestra.models.weights import WeightSource
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion, SampledTokens, TokenSequence
from palestra.waiting import race, together
from palestra_engines.external.api import Chunk
from palestra_engines.external.process import ProgressClock
from palestra_engines.external.reply import StreamedReply
from palestra_engines.external.served_policy import ExternalPolicy, ServedAdapter

LOOK_SECONDS = 2.0  # between two looks at a server
DOUBT_SECONDS = 5.0  # limit for a question to a server's health after one of its calls has failed
SILENT_SECONDS = 60.0  # a server that does not answer for so long has failed


class ExternalEngine:
    """An `Engine` on servers. Their answers are validated, and weight updates are atomic."""

    def __init__(self, policies: Mapping[str, ExternalPolicy], finish: bool, stuck_seconds: float) -> None:
        """Take over servers that are ready. Each policy has its own server. `finish`: new weights wait until running
        replies are complete. A server with requests but no progress for `stuck_seconds` has failed.
        """
        self._policies, self._finish = dict(policies), finish
        self._added: dict[str, ServedAdapter] = {}  # policies beside the first one of a server, by name
        self._running = asyncio.Event()
        self._running.set()
        self._pausing = asyncio.Lock()
        self._checked = asyncio.Lock()
        self._unchecked = set(policies)
        self._waiting, self._stuck_seconds = 0, stuck_seconds
        self._closed = False
        self._closing = asyncio.Event()
        self._broken: asyncio.Queue[str] = asyncio.Queue()

    async def generate(self, request: EngineRequest) -> AsyncIterator[SampledTokens]:
        """Stream a reply; see `Engine.generate`."""
        policy = self._policy(request.policy)
        _check_prompt(request.prompt, policy)
        check_sampling(request.sampling, policy.bounds.vocab_size)
        await self.check_servers()
        async with contextlib.AsyncExitStack() as stack:
            self._waiting += 1
            try:
                turn = await stack.enter_async_context(policy.turn(self._running, request.policy))
            finally:
                self._waiting -= 1
            self._check_open()
            reply = StreamedReply(request, turn.version, policy.bounds)
            chunks = cast("AsyncGenerator[Chunk, None]", policy.api.generate(request, turn.adapter))
            async with aclosing(chunks):
                try:
                    async for chunk in chunks:
                        for piece in reply.take(chunk, turn.sent):
                            policy.sampled_tokens += len(piece.ids)
                            yield piece
                        fault_point("during_generation")
                except EngineFailure:
                    self._check_open()  # a stream that ended because the engine was stopped says so
                    await self._look_after(policy)
                    raise
            reply.check_finished()

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Let the server compute a prompt; see `Engine.score`."""
        served = self._policy(policy)
        _check_prompt(prompt, served)
        await self.check_servers()
        async with served.turn(self._running, policy) as turn:
            self._check_open()
            try:
                found = await served.api.score(prompt, turn.adapter)
            except EngineFailure:
                self._check_open()
                await self._look_after(served)
                raise
        if wrong := [logprob for logprob in found if not math.isfinite(logprob) or logprob > 0]:
            raise EngineFailure(f"the engine says that the logprob of a token of the prompt is {wrong[0]}")
        return found

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Pause the server, and transfer new weights by file or broadcast; see `Engine.sync_weights`.

        The pause is necessary: a server whose layers are replaced during a pass crashes.
        """
        served = self._policy(policy)
        self._check_open()
        await self.check_servers()
        with served.expecting(source):
            new = await in_thread(lambda: served.prepare(policy, source, version))
            try:
                # Not between the two halves of a pause or of its end.
                async with self._failing(served, version), self._pausing:
                    finish = self._finish or not served.api.splits_versions
                    await served.take(policy, new, version, finish, not self._running.is_set())
            finally:
                new.discard()

    @contextlib.asynccontextmanager
    async def _failing(self, served: ExternalPolicy, version: PolicyVersion) -> AsyncIterator[None]:
        """Let the engine fail as a whole where new weights could not be taken: they may be there in part."""
        try:
            yield
        except (EngineFailure, InvalidRequest) as error:
            self._check_open()
            why = f"the engine of {served.name!r} has failed while it got version {version}: {error}"
            self._broken.put_nowait(why)
            raise EngineFailure(why) from error

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Load one more adapter on the server of a policy with an adapter; see `Engine.add_policy`.

        A server of whole weights has no memory for others.
        """
        if name in self._policies and source is not None:
            await self.sync_weights(name, version, source)
            return
        served = self._policy(like)
        if not isinstance(served, ServedAdapter):
            raise ModelError(
                f"this engine can't get the policy {name!r}: a server has the whole weights of one model; train an "
                "adapter (policies.NAME.adapter), or take engine.kind = 'embedded'"
            )
        self._check_open()
        await self.check_servers()
        if source is None:
            served.copy(name, like)
        else:
            new = await in_thread(lambda: served.prepare(name, source, version))
            async with self._failing(served, version):
                await served.take(name, new, version, finish=False, paused=not self._running.is_set())
        self._added[name] = served

    async def remove_policy(self, name: str) -> None:
        """Free the memory of an added policy; its requests fail. Unknown names are ignored."""
        served = self._added.pop(name, None)
        if served is not None:
            await served.remove(name)

    async def pause(self) -> None:
        """Finish running forward passes; none starts until `resume`."""
        await self.check_servers()
        async with self._pausing:
            if self._running.is_set():
                self._running.clear()
                await together(*(policy.api.pause() for policy in self._policies.values()))

    async def resume(self) -> None:
        """Allow forward passes again after `pause`."""
        async with self._pausing:
            if not self._running.is_set():
                await together(*(policy.api.resume() for policy in self._policies.values()))
                self._running.set()

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's weights; see `Engine.version`."""
        return self._policy(policy).version_of(policy)

    def load(self) -> EngineLoad:
        """Return waiting and running requests, and the servers' last figures."""
        served = list(self._policies.values())
        return EngineLoad(
            waiting=self._waiting,
            running=sum(policy.running for policy in served),
            kv_bytes_used=sum(int(policy.counters.kv_share * policy.kv_bytes) for policy in served),
            kv_bytes=sum(policy.kv_bytes for policy in served),
            passes=sum(policy.counters.passes for policy in served),
            prefilled_tokens=sum(policy.counters.prefilled_tokens for policy in served),
            sampled_tokens=sum(policy.sampled_tokens for policy in served),
            moved_bytes=sum(policy.moved_bytes for policy in served),
        )

    async def failure(self) -> str:
        """Check the servers, and return the reason when one of them has ended or no longer answers."""
        watches = (self._watch(name, policy) for name, policy in self._policies.items())
        return (await race(self._broken.get(), *watches)).result

    async def close(self) -> None:
        """Fail open requests, and end the servers that the job has started."""
        self._closed = True
        self._closing.set()
        self._running.set()
        for policy in self._policies.values():
            await policy.close()

    async def _watch(self, name: str, policy: ExternalPolicy) -> str:
        """Return why a policy's server cannot go on; a server that was stopped never returns."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        problem, clock = "it does not answer", ProgressClock(answered, policy.progress)
        while True:
            if self._closed:
                await asyncio.Future()
            if policy.process is not None and (ended := policy.process.ended()) is not None:
                return f"the engine of {name!r} has ended: {ended}"
            try:
                policy.counters = await policy.api.counters()
                answered = loop.time()
            except PalestraError as error:
                problem = str(error)
            if loop.time() - answered > SILENT_SECONDS and not self._closed:
                return f"the engine of {name!r} has not answered for {SILENT_SECONDS:.0f} s: {problem}"
            may_move = policy.running > 0 and self._running.is_set() and not policy.replacing
            stalled = clock.seconds(loop.time(), policy.progress, may_move)
            if stalled > self._stuck_seconds and not self._closed:
                requests = "request" if policy.running == 1 else "requests"
                return (
                    f"the engine of {name!r} has {policy.running} {requests} and has computed nothing for "
                    f"{self._stuck_seconds:g} s (engine.stuck_seconds)"
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def _look_after(self, policy: ExternalPolicy) -> None:
        """Report a dead server before a call's error reaches the pool, which resamples only if its worker failed."""
        try:
            async with asyncio.timeout(DOUBT_SECONDS):
                policy.counters = await policy.api.counters()
        except TimeoutError:
            return  # the server may be busy; the pool replaces workers that make no progress
        except PalestraError as error:
            ended = None if policy.process is None else await in_thread(policy.process.how_it_ended)
            self._broken.put_nowait(f"the engine of {policy.name!r} has ended: {ended or error}")

    async def check_servers(self) -> None:
        """Check once, before any other request, whether each server fits its policy."""
        if not self._unchecked:
            return
        async with self._checked:
            for name in sorted(self._unchecked):
                policy = self._policies[name]
                try:
                    await policy.begin()
                except EngineFailure as error:
                    ended = None if policy.process is None else await in_thread(policy.process.how_it_ended)
                    why = f"does not answer: {error}" if ended is None else f"has ended: {ended}"
                    raise EngineFailure(f"the engine of {name!r} {why}") from error
                self._unchecked.discard(name)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineFailure("the engine was stopped")

    def _policy(self, name: str) -> ExternalPolicy:
        found = self._policies.get(name) or self._added.get(name)
        if found is None:
            known = ", ".join(map(repr, (*self._policies, *self._added)))
            raise ModelError(f"this engine has the policies {known}, not {name!r}")
        return found


def _check_prompt(prompt: TokenSequence, policy: ExternalPolicy) -> None:
    check_prompt(prompt, policy.bounds.vocab_size, policy.bounds.max_context - 1, policy.api.sees)
