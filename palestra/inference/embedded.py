"""The embedded engine: continuous batching over a transformers model, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from palestra.config import EngineConfig
from palestra.errors import EngineFailure, InvalidRequest, ModelError
from palestra.grammars.pool import Grammars
from palestra.inference.adapters import Adapter, Adapters
from palestra.inference.batch import MIN_ROWS, Batch
from palestra.inference.inbox import Inbox
from palestra.inference.request import DONE, Request
from palestra.models.causal_lm import CausalLM, set_threads
from palestra.models.memory import memory_bytes
from palestra.schemas.records import Ids, PolicyVersion, SampledTokens, SamplingParams

log = logging.getLogger("palestra.engine")


class EmbeddedEngine:
    """Implements `Engine` for one base model: the policy that is the model itself, and those that adapt it."""

    def __init__(
        self,
        model: CausalLM,
        policy: str,
        stop_ids: Iterable[int],
        config: EngineConfig,
        deterministic: bool = False,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 - immutable
        grammars: Grammars | None = None,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
    ) -> None:
        """`grammars` is needed for calls that have one; `adapters` are further policies, on the same model.

        Raises:
            ModelError: `deterministic`, and this machine's arithmetic can't keep it; or an adapter that does not fit.
        """
        self._model, self._policy, self._config = model, policy, config
        self._grammars, self._adapters = grammars, dict(adapters)
        if deterministic and adapters:
            raise ModelError("results can't be reproduced bit by bit where adapters share a batch")
        applied = Adapters(model)
        for name, adapter in self._adapters.items():
            applied.set(name, adapter)
        advance = None if grammars is None else grammars.advance
        self._batch = Batch(model, applied, stop_ids, config, deterministic, token_budget(model, config), advance)
        self._versions = dict.fromkeys((policy, *adapters), version)
        for name in self._versions:
            self._batch.set_version(name, version)
        self._inbox = Inbox()
        self._update: Callable[[], None] | None = None  # new weights that wait for what is running
        self._paused = self._stopping = False
        if deterministic:
            self._check_determinism()
        self._thread = threading.Thread(target=self._run, name="palestra-engine", daemon=True)
        self._thread.start()

    # What others call, on any event loop.

    async def generate(self, policy: str, prompt_ids: Ids, sampling: SamplingParams) -> AsyncIterator[SampledTokens]:
        """See `Engine`.

        Raises:
            InvalidRequest: an id that the model does not have, or a grammar that can't be used.
            GrammarRefused: the grammar is over a bound, perhaps at a token of the reply.
        """
        self._require(policy)
        self._check_ids(prompt_ids, sampling)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        request = Request(policy, prompt_ids, sampling, lambda item: loop.call_soon_threadsafe(pieces.put_nowait, item))
        if sampling.grammar:
            if self._grammars is None:
                raise InvalidRequest("this engine has no grammars", "response_format")
            request.matcher = await self._grammars.matcher(sampling.grammar)
        try:
            self._inbox.put(lambda: self._batch.add(request))
            while (item := await pieces.get()) is not DONE:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            request.cancelled = True
            if self._grammars is not None and request.matcher is not None:
                self._grammars.release(request.matcher)

    async def update_weights(self, policy: str, version: PolicyVersion, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine`.

        `weights` are (name, tensor) pairs as `CausalLM.named_parameters` gives them; for an adapter, as PEFT does.

        Replies that are being made go on under the new weights, or are finished first, as `in_flight_updates` says;
        while the engine is paused they can't be finished, and so go on.
        """
        self._require(policy)
        replace = self._replace_adapter if policy in self._adapters else self._replace_weights
        await self._on_thread(lambda: replace(policy, version, weights), waits=True)

    async def pause(self) -> None:
        """See `Engine`."""
        await self._on_thread(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """See `Engine`."""
        await self._on_thread(lambda: setattr(self, "_paused", False))

    def version(self, policy: str) -> PolicyVersion:
        """See `Engine`."""
        self._require(policy)
        return self._versions[policy]

    async def close(self) -> None:
        """See `Engine`."""
        with contextlib.suppress(EngineFailure):  # its thread is over
            self._inbox.put(lambda: setattr(self, "_stopping", True))
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def failure(self) -> str:
        """See `Engine`."""
        return await asyncio.wrap_future(self._inbox.failure())

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self._batch.passes

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self._batch.prefilled_tokens

    @property
    def sampled_tokens(self) -> int:
        """Tokens that were sampled."""
        return self._batch.sampled_tokens

    def _require(self, policy: str) -> None:
        if policy not in self._versions:
            raise ModelError(f"this engine has the policies {', '.join(map(repr, self._versions))}, not {policy!r}")

    def _check_ids(self, prompt_ids: Ids, sampling: SamplingParams) -> None:
        """One call with an id that does not exist would fail all those beside it."""
        size = self._model.vocab_size
        if len(prompt_ids) == 0 or int(prompt_ids.min()) < 0 or int(prompt_ids.max()) >= size:
            raise InvalidRequest(f"a prompt has at least one token, and all are from 0 to {size - 1}", "prompt")
        for name, ids in (
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("stop_token_ids", list(sampling.stop_ids)),
        ):
            if any(not 0 <= token < size for token in ids):
                raise InvalidRequest(f"{name} names tokens from 0 to {size - 1}", name)

    async def _on_thread(self, work: Callable[[], None], waits: bool = False) -> None:
        """Do something between two passes; with `waits`, as `in_flight_updates` says, when nothing is running."""
        promise = self._inbox.promise()

        def run() -> None:
            if promise.done() or not promise.set_running_or_notify_cancel():  # nobody waits for it any more
                return
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised at the caller
                promise.set_exception(error)
            else:
                promise.set_result(None)

        def when_idle() -> None:
            if self._config.in_flight_updates == "continue" or self._paused or not self._batch.busy:
                run()
            else:
                self._update, self._batch.draining = run, True

        self._inbox.put(when_idle if waits else run)
        await asyncio.wrap_future(promise)

    # The engine's thread.

    def _run(self) -> None:
        set_threads(self._config.threads)
        problem = None
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._inbox.take(wait=self._paused or self._batch.idle)
                    if not (self._paused or self._stopping):
                        self._batch.step()
                    if self._update is not None and (self._paused or not self._batch.busy):
                        update, self._update, self._batch.draining = self._update, None, False
                        update()
        except Exception as error:  # a defect of the engine itself
            log.exception("the engine's thread ended")
            problem = f"the engine failed: {type(error).__name__}: {error}"
        why = problem or "the engine was stopped"
        self._inbox.close(why, failed=problem is not None)
        self._batch.fail_all(EngineFailure(why))
        self._batch.flush()

    def _replace_adapter(self, policy: str, version: PolicyVersion, weights: Iterable[tuple[str, Tensor]]) -> None:
        adapter = Adapter(self._adapters[policy].settings)
        adapter.replace(weights)
        self._batch.adapters.set(policy, adapter)
        self._adapters[policy] = adapter
        self._versions[policy] = version
        self._batch.set_version(policy, version)

    def _replace_weights(self, policy: str, version: PolicyVersion, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self._model.named_parameters())
        given = dict(weights)
        for name, tensor in given.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ModelError(f"the engine's model has no weight {name} of shape {tuple(tensor.shape)}")
        if missing := own.keys() - given.keys():
            raise ModelError(f"no new weights were given for {', '.join(sorted(missing))}")
        for name, tensor in given.items():
            own[name].copy_(tensor)
        self._versions[policy] = version
        for name in self._versions:  # what adapters computed was computed on the old base
            self._batch.set_version(name, self._versions[name])

    @torch.inference_mode()
    def _check_determinism(self) -> None:
        """Refuse to call results reproducible where this machine's matrix products say otherwise.

        A row must come out the same beside any number of other rows; prompts run alone, so only the products of
        decoding, with `MIN_ROWS` to `max_batch` rows, are tried: all layers' weights once, on random input.
        """
        set_threads(self._config.threads)
        generator = torch.Generator().manual_seed(0)
        for name, weight in self._model.named_parameters():
            if weight.ndim != 2:
                continue
            rows = torch.randn((self._config.max_batch, weight.shape[1]), generator=generator).to(weight)
            whole = torch.nn.functional.linear(rows, weight)
            most = self._config.max_batch
            for count in {n for n in (MIN_ROWS, MIN_ROWS + 1, most // 2, most - 1) if MIN_ROWS <= n <= most}:
                if not torch.equal(torch.nn.functional.linear(rows[:count], weight), whole[:count]):
                    raise ModelError(
                        f"deterministic = true is not possible here: {name} gives other bits for {count} rows than "
                        f"for {self._config.max_batch}; set engine.dtype = 'float32', or engine.threads = 1"
                    )


def token_budget(model: CausalLM, config: EngineConfig) -> int:
    """Tokens whose keys and values fit into `cache_gib`, or into a quarter of the memory that this process may use."""
    each = model.layers * 2 * model.key_heads * model.head_dim * model.compute_dtype.itemsize
    if config.cache_gib is not None:
        size = config.cache_gib * 2**30
    elif model.device.type == "cuda":
        size = torch.cuda.mem_get_info(model.device)[0] / 2
    else:
        size = memory_bytes() / 4
    return int(size // each)
