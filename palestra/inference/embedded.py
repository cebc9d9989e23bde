"""The embedded engine: continuous batching over a transformers model, in a thread of its own.

The loop reads: take what arrived, admit what fits (each distinct prompt is computed once), decode one token for all.
Requests join and leave between two passes. What a row gets never depends on the rows beside it, except through the
rounding of matrix products; with `deterministic` that is excluded too (see `_check_determinism`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from palestra.config import EngineConfig
from palestra.errors import EngineFailure, ModelError
from palestra.inference.draw import uniform
from palestra.inference.kv_cache import DecodeAttend, KVCache, PrefillAttend, Row
from palestra.inference.sampling import sample
from palestra.models.causal_lm import CausalLM, set_threads
from palestra.schemas.records import Ids, PolicyVersion, SampledTokens, Sampling

log = logging.getLogger("palestra.engine")
_DONE = object()
_MIN_ROWS = 4  # products of fewer rows take another way through the processor, and round differently


@dataclass(slots=True, eq=False)
class _Sequence:
    prompt: Ids
    sampling: Sampling
    deliver: Callable[[Any], object]  # SampledTokens, then _DONE or an exception
    tokens: int = 0
    last: int = -1
    row: Row | None = None
    cancelled: bool = field(default=False)


class EmbeddedEngine:
    """Implements `Engine` for one policy."""

    def __init__(
        self,
        model: CausalLM,
        policy: str,
        stop_ids: Iterable[int],
        config: EngineConfig,
        deterministic: bool = False,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 - immutable
    ) -> None:
        self._model, self._policy, self._config = model, policy, config
        self._stops = tuple(sorted(set(stop_ids)))
        self._deterministic, self._min_rows = deterministic, _MIN_ROWS if deterministic else 1
        self._version = version
        parameter = next(iter(model.model.parameters()))
        self._device, self._dtype = parameter.device, parameter.dtype
        self._cache = self._new_cache()
        self._prefixes: OrderedDict[bytes, tuple[Tensor, Tensor]] = OrderedDict()
        self._prefix_tokens = 0
        self._waiting: list[_Sequence] = []
        self._running: dict[Row, _Sequence] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._paused = self._stopping = False
        self.sampled_tokens = self.prefilled_tokens = self.passes = 0
        self._outbox: list[tuple[_Sequence, Any]] = []
        if deterministic:
            self._check_determinism()
        self._thread = threading.Thread(target=self._run, name="palestra-engine", daemon=True)
        self._thread.start()

    # What others call, on any event loop.

    async def generate(self, policy: str, prompt_ids: Ids, sampling: Sampling) -> AsyncIterator[SampledTokens]:
        """See `Engine`."""
        self._require(policy)
        if self._stopping:
            raise EngineFailure("the engine was stopped")
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        sequence = _Sequence(prompt_ids, sampling, lambda item: loop.call_soon_threadsafe(pieces.put_nowait, item))
        self._inbox.put(lambda: self._waiting.append(sequence))
        try:
            while (item := await pieces.get()) is not _DONE:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            sequence.cancelled = True

    async def update_weights(self, policy: str, version: PolicyVersion, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine`. `weights` are (name, tensor) pairs as `CausalLM.named_parameters` gives them."""
        self._require(policy)
        await self._on_thread(lambda: self._replace_weights(version, weights))

    async def pause(self) -> None:
        """See `Engine`."""
        await self._on_thread(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """See `Engine`."""
        await self._on_thread(lambda: setattr(self, "_paused", False))

    def version(self, policy: str) -> PolicyVersion:
        """See `Engine`."""
        self._require(policy)
        return self._version

    async def close(self) -> None:
        """See `Engine`."""
        self._inbox.put(lambda: setattr(self, "_stopping", True))
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _require(self, policy: str) -> None:
        if policy != self._policy:
            raise ModelError(f"this engine has the policy {self._policy!r}, not {policy!r}")

    async def _on_thread(self, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised at the caller
                loop.call_soon_threadsafe(done.set_exception, error)
            else:
                loop.call_soon_threadsafe(done.set_result, None)

        self._inbox.put(run)
        await done

    # The engine's thread.

    def _run(self) -> None:
        set_threads(self._config.threads)
        problem: Exception = EngineFailure("the engine was stopped")
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take_arrivals()
                    if not (self._paused or self._stopping):
                        self._pass()
        except Exception as error:  # a defect of the engine itself
            log.exception("the engine's thread ended")
            problem = error
        self._stopping = True
        self._fail_all(problem)
        self._flush()

    def _pass(self) -> None:
        """One turn of the loop."""
        try:
            self._admit()
            self._decode()
        except Exception as error:  # noqa: BLE001 - fails the calls, not the engine
            self._fail_all(error)
        self._flush()

    def _take_arrivals(self) -> None:
        """Run what was put into the inbox; wait for something if there is nothing to do."""
        idle = self._paused or not (self._waiting or self._running)
        while True:
            try:
                self._inbox.get(block=idle)()
            except queue.Empty:
                return
            idle = False

    def _admit(self) -> None:
        """Start as many waiting sequences as there is room for, oldest first."""
        self._waiting = [s for s in self._waiting if not s.cancelled]
        room = self._config.max_batch - len(self._running)
        batch, self._waiting = self._waiting[: max(room, 0)], self._waiting[max(room, 0) :]
        try:
            while batch:
                now = self._prefill_some(batch)
                self._start(batch[:now])
                batch = batch[now:]
        except Exception:
            self._waiting = batch + self._waiting
            raise

    def _prefill_some(self, batch: list[_Sequence]) -> int:
        """Compute the prompts of the first sequences that are not known yet; returns for how many all are known now."""
        new: dict[bytes, Ids] = {}
        tokens = 0
        for number, sequence in enumerate(batch):
            key = sequence.prompt.tobytes()
            if key in self._prefixes or key in new:
                continue
            if new and (self._deterministic or tokens + len(sequence.prompt) > self._config.prefill_tokens):
                self._prefill(new)
                return number
            new[key] = sequence.prompt
            tokens += len(sequence.prompt)
        if new:
            self._prefill(new)
        return len(batch)

    def _prefill(self, prompts: dict[bytes, Ids]) -> None:
        lengths = [len(prompt) for prompt in prompts.values()]
        attend = PrefillAttend(lengths, self._model.layers)
        ids = torch.cat([torch.from_numpy(prompt.astype("int64")) for prompt in prompts.values()])
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = self._forward(ids, positions, attend)
        ends = torch.tensor(lengths).cumsum(0) - 1
        last = hidden[ends]
        for key, kept, row in zip(prompts, attend.kept(), last, strict=True):
            self._prefixes[key] = (kept, row)
            self._prefix_tokens += kept.shape[3]
        self.prefilled_tokens += sum(lengths)

    def _start(self, sequences: list[_Sequence]) -> None:
        """Sample the first token of sequences whose prompts are computed."""
        if not sequences:
            return
        rows = []
        for sequence in sequences:
            key = sequence.prompt.tobytes()
            self._prefixes.move_to_end(key)
            kept, last = self._prefixes[key]
            sequence.row = self._cache.insert(kept)
            self._running[sequence.row] = sequence
            rows.append(last)
        self._sample(sequences, torch.stack(rows))
        while self._prefix_tokens > self._config.prefix_cache_tokens and self._prefixes:
            _, (kept, _) = self._prefixes.popitem(last=False)
            self._prefix_tokens -= kept.shape[3]

    def _decode(self) -> None:
        """One pass: one more token for every running sequence."""
        for sequence in [s for s in self._running.values() if s.cancelled]:
            self._finish(sequence)
        if not self._running:
            return
        for row in list(self._running):
            self._cache.make_room(row)
        buckets = self._cache.in_order()
        order = [self._running[row] for bucket in buckets for row in bucket.rows]
        ids = torch.tensor([sequence.last for sequence in order])
        positions = torch.tensor([row.length for bucket in buckets for row in bucket.rows])
        hidden = self._forward(ids, positions, DecodeAttend(buckets))
        for sequence in order:
            assert sequence.row is not None
            sequence.row.length += 1
        self._sample(order, hidden[: len(order)])

    def _forward(self, ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """Hidden states [N, hidden], of a few more rows where there are too few to round as many do."""
        lacking = self._min_rows - len(ids)
        if lacking > 0:
            ids = torch.cat((ids, ids[:1].expand(lacking)))
            positions = torch.cat((positions, positions[:1].expand(lacking)))
        self.passes += 1
        return self._model.hidden(ids.to(self._device), positions.to(self._device), attend)

    def _sample(self, sequences: list[_Sequence], hidden: Tensor) -> None:
        """Draw the next token of each sequence from its hidden state, [B, hidden]."""
        lacking = self._min_rows - len(hidden)
        rows = torch.cat((hidden, hidden[:1].expand(lacking, -1))) if lacking > 0 else hidden
        logits = self._model.logits(rows)[: len(sequences)]
        chosen, logprobs = sample(
            logits,
            [s.sampling.temperature for s in sequences],
            [uniform(s.sampling.seed, s.tokens) for s in sequences],
            [self._stops if s.tokens < s.sampling.min_tokens else () for s in sequences],
        )
        for sequence, token, logprob in zip(sequences, chosen, logprobs, strict=True):
            sequence.tokens += 1
            sequence.last = token
            self._outbox.append((sequence, SampledTokens(ids=(token,), logprobs=(logprob,), version=self._version)))
            if token in self._stops or sequence.tokens >= sequence.sampling.max_tokens:
                self._outbox.append((sequence, _DONE))
                self._finish(sequence)
        self.sampled_tokens += len(sequences)

    def _finish(self, sequence: _Sequence) -> None:
        assert sequence.row is not None
        self._cache.remove(sequence.row)
        del self._running[sequence.row]

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        for sequence, item in outbox:
            if not sequence.cancelled:
                try:
                    sequence.deliver(item)
                except RuntimeError:  # the caller's event loop is closed: nobody is left to tell
                    sequence.cancelled = True

    def _fail_all(self, error: Exception) -> None:
        """Every call in the engine fails; the next ones start from nothing."""
        for sequence in [*self._running.values(), *self._waiting]:
            self._outbox.append((sequence, EngineFailure(f"{type(error).__name__}: {error}")))
        self._running.clear()
        self._waiting.clear()
        self._cache = self._new_cache()
        self._forget_prefixes()

    def _replace_weights(self, version: PolicyVersion, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self._model.named_parameters())
        given = dict(weights)
        for name, tensor in given.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ModelError(f"the engine's model has no weight {name} of shape {tuple(tensor.shape)}")
        if missing := own.keys() - given.keys():
            raise ModelError(f"no new weights were given for {', '.join(sorted(missing))}")
        for name, tensor in given.items():
            own[name].copy_(tensor)
        self._version = version
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        self._prefixes.clear()
        self._prefix_tokens = 0

    def _new_cache(self) -> KVCache:
        m = self._model
        return KVCache(m.layers, m.key_heads, m.head_dim, self._dtype, self._device)

    @torch.inference_mode()
    def _check_determinism(self) -> None:
        """Refuse to call results reproducible where this machine's matrix products say otherwise.

        A row must come out the same beside any number of other rows; prompts run alone, so only the products of
        decoding, with `_MIN_ROWS` to `max_batch` rows, are tried: all layers' weights once, on random input.
        """
        set_threads(self._config.threads)
        generator = torch.Generator().manual_seed(0)
        for name, weight in self._model.named_parameters():
            if weight.ndim != 2:
                continue
            rows = torch.randn((self._config.max_batch, weight.shape[1]), generator=generator).to(weight)
            whole = torch.nn.functional.linear(rows, weight)
            most = self._config.max_batch
            for count in {n for n in (_MIN_ROWS, _MIN_ROWS + 1, most // 2, most - 1) if _MIN_ROWS <= n <= most}:
                if not torch.equal(torch.nn.functional.linear(rows[:count], weight), whole[:count]):
                    raise ModelError(
                        f"deterministic = true is not possible here: {name} gives other bits for {count} rows than "
                        f"for {self._config.max_batch}; set engine.dtype = 'float32', or engine.threads = 1"
                    )
