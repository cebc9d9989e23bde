"""An engine whose models are in servers of another project, one server for each policy."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import cast

from palestra.engine.base import EngineLoad, EngineRequest
from palestra.engine.external.api import Chunk
from palestra.engine.external.reply import Reply
from palestra.engine.external.served_policy import ServedPolicy
from palestra.errors import EngineFailure, InvalidRequest, ModelError, PalestraError
from palestra.models.weights import WeightSource
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion, SampledTokens, TokenSequence
from palestra.waiting import race, together

LOOK_SECONDS = 2.0  # between two looks at a server
SILENT_SECONDS = 60.0  # a server that does not answer for so long has failed


class ExternalEngine:
    """Implements `Engine` with servers. Their answers are checked, and an update of weights is never half done."""

    def __init__(self, policies: Mapping[str, ServedPolicy], finish: bool) -> None:
        """Take over servers that are ready.

        Args:
            policies: by name, each with a server of its own.
            finish: whether new weights wait until the replies that are being sampled are complete.
        """
        self._policies, self._finish = dict(policies), finish
        self._running = asyncio.Event()
        self._running.set()
        self._pausing = asyncio.Lock()
        self._checked = asyncio.Lock()
        self._unchecked = set(policies)
        self._waiting = self._sampled_tokens = 0
        self._closed = False
        self._closing = asyncio.Event()
        self._broken: asyncio.Queue[str] = asyncio.Queue()

    async def generate(self, request: EngineRequest) -> AsyncIterator[SampledTokens]:
        """See `Engine`.

        Raises:
            InvalidRequest: an id that the model does not have, media, or a way of sampling that the server lacks.
            ModelError: the engine has no such policy.
        """
        policy = self._policy(request.policy)
        _check_prompt(request.prompt, policy)
        await self._check_servers()
        async with contextlib.AsyncExitStack() as stack:
            self._waiting += 1
            try:
                await stack.enter_async_context(policy.turn(self._running))
            finally:
                self._waiting -= 1
            self._check_open()
            reply, before = Reply(request, policy.version, policy.bounds), len(policy.sent)
            chunks = cast("AsyncGenerator[Chunk, None]", policy.api.generate(request))
            async with aclosing(chunks):
                try:
                    async for chunk in chunks:
                        for piece in reply.take(chunk, policy.sent[before:]):
                            self._sampled_tokens += len(piece.ids)
                            yield piece
                except EngineFailure:
                    self._check_open()  # a stream that ended because the engine was stopped says so
                    raise
            reply.check_finished()

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Let the server compute a prompt; see `Engine.score`.

        Args:
            policy: whose present weights are asked.
            prompt: [P] ids.

        Raises:
            InvalidRequest: an id that the model does not have, too many of them, or media.
            ModelError: the engine has no such policy.
            EngineFailure: the server has no answer, or one that can't be.
        """
        served = self._policy(policy)
        _check_prompt(prompt, served)
        await self._check_servers()
        async with served.turn(self._running):
            self._check_open()
            found = await served.api.score(prompt.ids.tolist())
        if wrong := [logprob for logprob in found if not math.isfinite(logprob) or logprob > 0]:
            raise EngineFailure(f"the engine says that the logprob of a token of the prompt is {wrong[0]}")
        return found

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Write new weights into a file, pause the server and let it read them; see `Engine.sync_weights`.

        A server that is not paused while its layers are replaced dies, so there is no update without a pause.

        Args:
            policy: whose weights these are.
            version: what tokens that are sampled from them say.
            source: tensors of the model's names and shapes.
        """
        served = self._policy(policy)
        self._check_open()
        await self._check_servers()
        path = await in_thread(lambda: served.write(source, version))
        try:
            # Not between the two halves of a pause or of its end.
            async with self._pausing:
                finish = self._finish or not served.api.splits_versions
                await served.replace(path, version, finish, not self._running.is_set())
        except (EngineFailure, InvalidRequest) as error:
            self._check_open()
            why = f"the engine of {policy!r} has failed while it got version {version}: {error}"
            self._broken.put_nowait(why)
            raise EngineFailure(why) from error
        finally:
            path.unlink(missing_ok=True)

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Give a policy that is there other weights; a server has one model, so that no other can be added.

        Args:
            name: of the policy.
            like: name of the policy whose kind of model it has.
            version: what tokens that are sampled from it say.
            source: tensors of the model's names and shapes.
        """
        if name not in self._policies or source is None:
            raise ModelError(
                f"this engine can't get the policy {name!r}: a server has one model; engine.kind = 'embedded' can play "
                "against past versions"
            )
        await self.sync_weights(name, version, source)

    async def remove_policy(self, name: str) -> None:
        """Do nothing: no policy can have been added."""

    async def pause(self) -> None:
        """Finish the forward passes that run, and begin no other until `resume`."""
        await self._check_servers()
        async with self._pausing:
            if self._running.is_set():
                self._running.clear()
                await together(*(policy.api.pause() for policy in self._policies.values()))

    async def resume(self) -> None:
        """Let forward passes run again after `pause`; requests that waited continue where they were."""
        async with self._pausing:
            if not self._running.is_set():
                await together(*(policy.api.resume() for policy in self._policies.values()))
                self._running.set()

    def version(self, policy: str) -> PolicyVersion:
        """See `Engine`.

        Raises:
            ModelError: the engine has no such policy.
        """
        return self._policy(policy).version

    def load(self) -> EngineLoad:
        """Return how many requests wait and run, and what the servers said of themselves at the last look."""
        served = list(self._policies.values())
        return EngineLoad(
            waiting=self._waiting,
            running=sum(policy.running for policy in served),
            kv_bytes_used=sum(int(policy.counters.kv_share * policy.kv_bytes) for policy in served),
            kv_bytes=sum(policy.kv_bytes for policy in served),
            passes=sum(policy.counters.passes for policy in served),
            prefilled_tokens=sum(policy.counters.prefilled_tokens for policy in served),
            sampled_tokens=self._sampled_tokens,
        )

    async def failure(self) -> str:
        """Look at the servers, and return the reason when one of them has ended or does not answer any more."""
        watches = (self._watch(name, policy) for name, policy in self._policies.items())
        return (await race(self._broken.get(), *watches)).result

    async def close(self) -> None:
        """Fail the requests that are open, and end the servers that the job has started."""
        self._closed = True
        self._closing.set()
        self._running.set()
        for policy in self._policies.values():
            if policy.process is not None:
                await in_thread(policy.process.stop)
            await policy.api.close()
            with contextlib.suppress(OSError):
                policy.folder.rmdir()

    async def _watch(self, name: str, policy: ServedPolicy) -> str:
        """Return why a policy's server can't go on; a server that was stopped never returns."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        problem = "it does not answer"
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
            await asyncio.sleep(LOOK_SECONDS)

    async def _check_servers(self) -> None:
        """Ask each server once, before anything else is sent, whether it fits its policy.

        Raises:
            ConfigError: one does not.
        """
        if not self._unchecked:
            return
        async with self._checked:
            for name in sorted(self._unchecked):
                policy = self._policies[name]
                await policy.api.check()
                await policy.api.resume()  # a job that was killed may have left a server paused
                await policy.api.set_version(policy.version)
                self._unchecked.discard(name)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineFailure("the engine was stopped")

    def _policy(self, name: str) -> ServedPolicy:
        if name not in self._policies:
            raise ModelError(f"this engine has the policies {', '.join(map(repr, self._policies))}, not {name!r}")
        return self._policies[name]


def _check_prompt(prompt: TokenSequence, policy: ServedPolicy) -> None:
    """Refuse a prompt that the model can't read.

    Raises:
        InvalidRequest: an id that does not exist, too many of them, or media.
    """
    ids, bounds = prompt.ids, policy.bounds
    if prompt.media:
        raise InvalidRequest("the models of this engine read text only", "prompt")
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= bounds.vocab_size:
        raise InvalidRequest(
            f"a prompt has at least one token, and all are from 0 to {bounds.vocab_size - 1}", "prompt"
        )
    if len(ids) >= bounds.max_context:
        raise InvalidRequest(f"a prompt has less than {bounds.max_context} tokens", "prompt")
