"""The embedded engine: continuous batching over transformers models, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from palestra.engine.base import EngineLoad, EngineRequest, check_prompt, check_sampling
from palestra.engine.embedded import scheduler
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.core import EngineCore
from palestra.engine.embedded.model_runner import PolicyModel, check_determinism
from palestra.engine.embedded.request import DONE, RunningRequest
from palestra.errors import EngineFailure, InvalidRequest, ModelError
from palestra.models.causal_lm import CausalLM
from palestra.models.device import memory_bytes
from palestra.models.kernels import kernels
from palestra.models.shared_cores import SharedCores, release_threads, set_threads
from palestra.models.weights import LocalWeights, WeightSource
from palestra.threads import in_thread
from palestra.types.calls import FIRST_VERSION, PolicyVersion, SampledTokens, TokenSequence

Command = Callable[[], None]
REST_SECONDS = 0.02  # an agent's next call often comes sooner than that; a training step takes much longer


class CommandQueue:
    """A queue of commands from any thread to one thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unsettled: set[Future[None]] = set()
        self._awaiting_failure: set[Future[str]] = set()
        self._closed: str | None = None  # why no command is taken any more
        self._failure: str | None = None  # the same reason, where the thread did not end in good order

    def put(self, command: Command) -> None:
        """Queue a command for the engine's thread."""
        with self._lock:
            self.check_open()
            self._queue.put(command)

    def check_open(self) -> None:
        """Raise EngineFailure if the thread has ended."""
        if self._closed is not None:
            raise EngineFailure(self._closed)

    def future(self) -> Future[None]:
        """Return a future for a command: the command sets its result, or `close` sets an error."""
        future: Future[None] = Future()
        self._unsettled.add(future)
        future.add_done_callback(self._unsettled.discard)
        return future

    def failure(self) -> Future[str]:
        """Return a future of the reason why the thread fails; it stays pending if the thread ends normally."""
        future: Future[str] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_result(self._failure)
            elif self._closed is None:
                self._awaiting_failure.add(future)
                future.add_done_callback(self._awaiting_failure.discard)  # where its caller is cancelled
        return future

    def run(self, wait: bool, rest: Callable[[], object] = lambda: None) -> None:
        """Run the queued commands; with `wait`, block until there is one. `rest` is called when no command comes for
        `REST_SECONDS`.
        """
        if wait:
            try:
                command = self._queue.get(timeout=REST_SECONDS)
            except queue.Empty:
                rest()
                command = self._queue.get()
            command()
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            command()

    def close(self, why: str, failed: bool) -> None:
        """Refuse further commands, fail all pending futures, and run what was queued before. `failed`: the thread ended
        because of a defect, which `failure` then reports.
        """
        with self._lock:
            self._closed, self._failure = why, why if failed else None
            awaiting = list(self._awaiting_failure)
        for future in list(self._unsettled):
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineFailure(why))
        self.run(wait=False)
        for reason in awaiting if failed else ():
            if reason.set_running_or_notify_cancel():
                reason.set_result(why)


log = logging.getLogger("palestra.engine")
LOOK_SECONDS = 0.5  # between two looks at what other processes use


class EmbeddedEngine:
    """An `Engine` for one or more policies, each with its own model, on one device."""

    def __init__(
        self,
        policies: Mapping[str, PolicyModel],
        config: EmbeddedEngineConfig,
        deterministic: bool = False,
        version: PolicyVersion = FIRST_VERSION,
        finish: bool = False,
    ) -> None:
        """Start the engine's thread. Each policy has its own model, whose present weights are of `version`. `finish`:
        running replies are completed before new weights count; otherwise they continue under these.
        `deterministic`: a reply is the same bit for bit in any batch.
        """
        self._policies, self._config, self._deterministic = dict(policies), config, deterministic
        self._finish = finish
        if deterministic:
            set_threads(config.threads)
        for policy in policies.values():
            self._prepare(policy.model)
        release_threads()  # of the caller's thread, which does not compute again
        total = kv_bytes(next(iter(policies.values())).model, config)
        self._core = EngineCore(self._policies, version, config, deterministic, total)
        self._commands = CommandQueue()
        self._syncs: list[tuple[str, Command]] = []  # new weights that wait for the running replies of their policy
        self._paused = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="palestra-engine", daemon=True)
        self._thread.start()

    # What others call, on any event loop.

    async def generate(self, request: EngineRequest) -> AsyncIterator[SampledTokens]:
        """Stream a reply; see `Engine.generate`. Raises GrammarRefused: the grammar exceeds a limit, perhaps at a token
        of the reply.
        """
        policy = self._policy(request.policy)
        _check_prompt(request.prompt, policy.model)
        check_sampling(request.sampling, policy.model.vocab_size)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        running = RunningRequest(request, lambda item: loop.call_soon_threadsafe(pieces.put_nowait, item))
        if request.sampling.grammar:
            if policy.grammars is None:
                raise InvalidRequest("this engine has no grammars", "response_format")
            running.matcher = await policy.grammars.matcher(request.sampling.grammar)
        try:
            self._commands.put(lambda: self._core.begin(running))
            while (item := await pieces.get()) is not DONE:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            running.cancelled = True
            if policy.grammars is not None and running.matcher is not None:
                policy.grammars.release(running.matcher)

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Compute a prompt by itself, between two steps; see `Engine.score`.

        Its keys and values are temporary, and not counted in `cache_gib`.
        """
        model = self._policy(policy).model
        _check_prompt(prompt, model)
        runner, found = self._core.policies[policy].runner, list[float]()
        await self._on_thread(lambda: found.extend(runner.score(policy, prompt, scheduler.PREFILL_CHUNK)))
        return found

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Copy new weights into the model of a policy; see `Engine.sync_weights`.

        While the engine is paused, running replies cannot be finished first, and so continue.
        """
        self._policy(policy)
        served = self._core.policies[policy]

        def sync(load: Command) -> None:
            if not self._finish or not self._must_wait(policy):
                load()
            else:
                self._core.scheduler.draining.add(policy)
                self._syncs.append((policy, load))

        await self._on_thread(lambda: served.load_weights(version, source), via=sync)

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Copy the model of a policy, and load other weights into the copy; see `Engine.add_policy`."""
        known = self._policy(like)

        def add() -> None:
            if is_new := name not in self._policies:
                self._add(name, replace(known, model=known.model.copied()), version)
            weights = LocalWeights(list(known.model.own_weights())) if source is None else source
            try:
                self._core.policies[name].load_weights(version, weights)
            except BaseException:
                if is_new:
                    self._remove(name)
                raise

        await self._on_thread(add)

    async def add_model(self, name: str, policy: PolicyModel, version: PolicyVersion) -> None:
        """Add a policy with its own model, of any kind.

        An adapter on the base of another policy shares its passes.
        """

        def add() -> None:
            if name in self._policies:
                raise ModelError(f"this engine has a policy {name!r} already")
            self._prepare(policy.model)
            self._add(name, policy, version)

        await self._on_thread(add)

    async def remove_policy(self, name: str) -> None:
        """Fail a policy's requests, and free its memory; see `Engine.remove_policy`."""
        await self._on_thread(lambda: self._remove(name) if name in self._policies else None)

    async def pause(self) -> None:
        """Finish the running forward pass; none starts until `resume`."""
        await self._on_thread(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """Allow forward passes again after `pause`."""
        await self._on_thread(lambda: setattr(self, "_paused", False))

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's weights; see `Engine.version`."""
        self._policy(policy)
        return self._core.policies[policy].version

    def load(self) -> EngineLoad:
        """Return waiting and running requests, and the counters of `/metrics`."""
        return self._core.load()

    async def close(self) -> None:
        """Fail open requests, and stop the engine's thread."""
        with contextlib.suppress(EngineFailure):  # its thread has ended already
            self._commands.put(lambda: setattr(self, "_stopping", True))
        await in_thread(self._thread.join)  # not in a pool, for whose threads a process that ends would wait
        for name in tuple(self._core.policies):  # who keeps a closed engine, as FastAPI keeps routes, keeps no weights
            self._core.remove(name)
        self._policies = {}

    async def failure(self) -> str:
        """Wait until the engine fails, and return the reason in one line."""
        return await asyncio.wrap_future(self._commands.failure())

    def _policy(self, name: str) -> PolicyModel:
        if name not in self._policies:
            self._commands.check_open()  # a closed engine has no policies
            raise ModelError(f"this engine has the policies {', '.join(map(repr, self._policies))}, not {name!r}")
        return self._policies[name]

    async def _on_thread(self, work: Command, via: Callable[[Command], None] = lambda run: run()) -> None:
        """Run something on the engine's thread, between two turns, and wait for it."""
        future = self._commands.future()

        def run() -> None:
            if future.done() or not future.set_running_or_notify_cancel():  # the caller has given up
                return
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised at the caller
                future.set_exception(error)
            else:
                future.set_result(None)

        self._commands.put(lambda: via(run))
        await asyncio.wrap_future(future)

    # The engine's thread.

    def _run(self) -> None:
        cores = SharedCores(self._config.threads, fixed=self._deterministic)
        cores.begin()  # before the first command, which may compute
        problem = None
        try:
            with torch.inference_mode():
                while not self._stopping:
                    # While the engine rests, a training step is likely to need the cores, and threads that spin.
                    idle = self._paused or self._core.scheduler.idle
                    self._commands.run(wait=idle, rest=release_threads)
                    if idle:
                        cores.begin()
                    if not (self._paused or self._stopping):
                        self._core.step()
                        cores.note(LOOK_SECONDS)
                    self._sync_drained()
        except Exception as error:  # a defect of the engine itself
            log.exception("the engine's thread ended")
            problem = f"the engine failed: {type(error).__name__}: {error}"
        why = problem or "the engine was stopped"
        self._commands.close(why, failed=problem is not None)
        self._core.fail_all(EngineFailure(why))
        self._core.flush()

    def _prepare(self, model: CausalLM) -> None:
        """Pack a model that is to be sampled from, and raise ModelError where it can't be deterministic and must be."""
        kernels().pack(model, exact=self._deterministic)
        if self._deterministic:
            check_determinism(model, self._config.max_batch)

    def _add(self, name: str, policy: PolicyModel, version: PolicyVersion) -> None:
        self._core.add(name, policy, version)
        self._policies = {**self._policies, name: policy}

    def _remove(self, name: str) -> None:
        """Fail the requests of a policy, and forget its model."""
        removed = self._policies[name]
        self._policies = {known: model for known, model in self._policies.items() if known != name}
        self._core.remove(name)
        removed.model.free_adapter()
        if removed.model.base is None:
            del removed
            gc.collect()  # a model's hooks refer to it, and what `tune_gc` has set would keep its weights for long

    def _must_wait(self, policy: str) -> bool:
        """Whether running replies of a policy can be finished before its weights are replaced."""
        return not self._paused and self._core.scheduler.has_begun(policy)

    def _sync_drained(self) -> None:
        """Replace the weights of policies whose running replies are finished."""
        due = [(policy, load) for policy, load in self._syncs if not self._must_wait(policy)]
        if due and not self._stopping:
            self._syncs = [sync for sync in self._syncs if sync not in due]
            for policy, load in due:
                self._core.scheduler.draining.discard(policy)
                load()


def _check_prompt(prompt: TokenSequence, model: CausalLM) -> None:
    check_prompt(prompt, model.vocab_size, model.max_positions, model.vision is not None)


def kv_bytes(model: CausalLM, config: EmbeddedEngineConfig) -> int:
    """Return the memory limit, in bytes, of an engine's keys and values.

    It is `cache_gib`; by default, a quarter of the memory that this process may use, or half of the free GPU memory.
    """
    if config.cache_gib is not None:
        return int(config.cache_gib * 2**30)
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0] / 2)
    return int(memory_bytes() / 4)


def token_budget(model: CausalLM, config: EmbeddedEngineConfig) -> int:
    """Return how many tokens of one model fit into the key-value memory; see `kv_bytes`."""
    return kv_bytes(model, config) // model.token_bytes
