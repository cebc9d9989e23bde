"""The engine's loop: admit what fits, compute a piece of the prompts, draw one more token for every running reply.

Requests join and leave between two passes. A prompt that several waiting requests have is computed once; of others the
longest beginning that is still in the prefix cache is copied. What a row gets never depends on the rows beside it,
except through the rounding of matrix products; in a deterministic batch that is excluded, too: prompts are computed
whole and alone, whatever was computed before, and products have at least `MIN_ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.config import EngineConfig
from palestra.errors import EngineFailure, GrammarRefused, PalestraError
from palestra.faults import fault_point
from palestra.grammars.process import Matcher
from palestra.inference.adapters import Adapters
from palestra.inference.draw import uniform
from palestra.inference.kv_cache import DecodeAttend, KVCache, PromptAttend, Row, capacity_for
from palestra.inference.prefix_cache import PrefixCache
from palestra.inference.request import DONE, Request
from palestra.inference.sampling import Drawn, RowSampling, sample
from palestra.models.causal_lm import CausalLM
from palestra.models.grammar import mask_bits, unpack_bits
from palestra.schemas.records import Ids, PolicyVersion, SampledTokens

MIN_ROWS = 4  # products of fewer rows take another way through the processor, and round differently


class Batch:
    """All requests of an engine, in its thread."""

    def __init__(
        self,
        model: CausalLM,
        adapters: Adapters,
        stop_ids: Iterable[int],
        config: EngineConfig,
        deterministic: bool,
        budget: int,
        advance: Callable[[Sequence[Matcher]], list[PalestraError | None]] | None = None,
    ) -> None:
        """Make an empty batch.

        Args:
            model: the base model.
            adapters: of the policies that are not the model itself.
            stop_ids: tokens that end a reply.
            config: the engine's settings.
            deterministic: whether results may not depend on what is beside them.
            budget: tokens whose keys and values may be in memory, prefix cache included.
            advance: makes the next masks of matchers, with an error for each that can't go on. None: there are none.
        """
        self._advance = advance
        self._model, self.adapters, self._config, self.budget = model, adapters, config, budget
        self._stops = frozenset(stop_ids)
        self._deterministic, self._min_rows = deterministic, MIN_ROWS if deterministic else 1
        self._device, self._dtype = model.device, model.compute_dtype
        self._cache = self._new_cache()
        self._prefixes: dict[str, PrefixCache] = {}  # by policy; all of its present version
        self._versions: dict[str, PolicyVersion] = {}
        self._waiting: list[Request] = []
        self._filling: list[Request] = []
        self._running: dict[Row, Request] = {}
        self._reserved = 0
        self._outbox: list[tuple[Request, Any]] = []
        self.draining = False  # admit nothing: new weights wait for what is running
        self.sampled_tokens = self.prefilled_tokens = self.passes = 0

    # What the engine asks of it.

    def add(self, request: Request) -> None:
        """A new request; it starts when there is room."""
        self._waiting.append(request)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.busy or (self._waiting and not self.draining))

    @property
    def busy(self) -> bool:
        """Whether any request has begun."""
        return bool(self._filling or self._running)

    def step(self) -> None:
        """One turn of the loop. A failure ends the request that caused it, or all, if that can't be told."""
        try:
            self._drop_cancelled()
            self._admit()
            self._fill()
            self._decode()
        except Exception as error:  # noqa: BLE001 - fails requests, not the engine
            self._survive(error)
        self.flush()

    def set_version(self, policy: str, version: PolicyVersion) -> None:
        """The policy has new weights: what was computed with the old ones is not used for new requests."""
        self._versions[policy] = version
        self._prefixes.pop(policy, None)

    def fail_all(self, error: Exception) -> None:
        """Every request fails."""
        self._fail_begun(error)
        self._outbox += [(request, _failure(error)) for request in self._waiting]
        self._waiting.clear()

    def flush(self) -> None:
        """Deliver what came out."""
        outbox, self._outbox = self._outbox, []
        for request, item in outbox:
            if not request.cancelled:
                try:
                    request.deliver(item)
                except RuntimeError:  # the caller's event loop is closed: nobody is left to tell
                    request.cancelled = True

    # Admission.

    def _drop_cancelled(self) -> None:
        self._waiting = [r for r in self._waiting if not r.cancelled]
        for request in [r for r in self._running.values() if r.cancelled]:
            self._finish(request)
        for request in self._filling:
            for follower in [f for f in request.followers if f.cancelled]:
                request.followers.remove(follower)
                self._release(follower)
        for request in [r for r in self._filling if r.cancelled]:
            self._filling.remove(request)
            self._release(request)
            if request.followers:  # the next of them goes on with what is computed
                heir, *others = request.followers
                heir.keys, heir.filled, heir.hidden = request.keys, request.filled, request.hidden
                heir.followers = others
                self._filling.insert(0, heir)

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while their longest replies fit into memory."""
        leaders = {(r.policy, r.version, r.prompt.tobytes()): r for r in self._filling}
        while self._waiting and not self.draining:
            request = self._waiting[0]
            begun = len(self._running) + sum(1 + len(r.followers) for r in self._filling)
            if begun >= self._config.max_batch or not self._reserve(request):
                return
            del self._waiting[0]
            request.version = self._versions.get(request.policy)
            key = (request.policy, request.version, request.prompt.tobytes())  # not of weights that were replaced
            if key in leaders:
                leaders[key].followers.append(request)
                continue
            leaders[key] = request
            self._filling.append(request)

    def _reserve(self, request: Request) -> bool:
        """Keep memory free for the whole request; prefixes make room for it."""
        longest = min(len(request.prompt) + request.sampling.max_tokens, self._model.max_positions)
        wanted = min(capacity_for(max(longest, len(request.prompt) + 1)), self.budget)
        if self._reserved + wanted > self.budget:
            return False
        self._reserved += wanted
        request.reserved = wanted
        kept = sum(cache.tokens for cache in self._prefixes.values())
        for cache in self._prefixes.values():
            too_many = kept + self._reserved - self.budget
            if too_many > 0:
                before = cache.tokens
                cache.shrink(before - too_many)
                kept -= before - cache.tokens
        return True

    def _release(self, request: Request) -> None:
        self._reserved -= request.reserved
        request.reserved = 0

    # Prompts.

    def _fill(self) -> None:
        """Compute up to `prefill_tokens` of the prompts; `prefill_chunk` while others wait for their next token."""
        left = self._config.prefill_tokens
        if self._running and not self._deterministic:
            left = min(left, self._config.prefill_chunk)
        while self._filling and left > 0:
            pieces: list[tuple[Request, int]] = []
            for request in self._filling[: 1 if self._deterministic else None]:
                if left <= 0:
                    break
                self._begin(request)
                lacking = len(request.prompt) - request.filled
                new = lacking if self._deterministic else min(lacking, left)
                if new > 0:
                    pieces.append((request, new))
                    left -= new
            if pieces:
                self._compute(pieces)
            self._start([r for r in self._filling if r.hidden is not None])

    def _begin(self, request: Request) -> None:
        """Memory for the prompt's keys and values, with what is known of them."""
        if request.keys is not None:
            return
        m = self._model
        shape = (m.layers, 2, m.key_heads, len(request.prompt), m.head_dim)
        request.keys = torch.empty(shape, dtype=self._dtype, device=self._device)
        if not self._deterministic:  # at least one token is computed: its hidden state gives the first of the reply
            request.filled = self._prefix(request.policy).copy_into(request.keys, request.prompt[:-1])

    def _compute(self, pieces: Sequence[tuple[Request, int]]) -> None:
        """Go on with some prompts, together; if that fails, one by one, to find whose fault it is."""
        try:
            self._compute_together(pieces)
        except Exception as error:
            if _out_of_memory(error):
                raise
            if len(pieces) == 1:
                self._fail(pieces[0][0], error)
                return
            for piece in pieces:
                self._compute([piece])

    def _compute_together(self, pieces: Sequence[tuple[Request, int]]) -> None:
        ids = torch.cat([torch.from_numpy(r.prompt[r.filled : r.filled + n].astype("int64")) for r, n in pieces])
        positions = torch.cat([torch.arange(r.filled, r.filled + n) for r, n in pieces])
        attend = PromptAttend([(r.keys, r.filled, n) for r, n in pieces if r.keys is not None])
        hidden = self._forward(ids, positions, attend, [r.policy for r, n in pieces for _ in range(n)])
        end = 0
        for request, new in pieces:
            end += new
            request.filled += new
            if request.filled == len(request.prompt):
                request.hidden = hidden[end - 1]
        self.prefilled_tokens += end

    def _start(self, computed: Sequence[Request]) -> None:
        """The first token of requests whose prompts are computed, and of those with the same prompt."""
        begin = [(request, one) for request in computed for one in (*request.followers, request)]
        if not begin:
            return
        hidden = torch.stack([request.hidden for request, _ in begin if request.hidden is not None])
        drawn = self._draw([one for _, one in begin], hidden)
        for number, (request, one) in enumerate(begin):
            assert request.keys is not None
            if one is request:  # the last of them
                self._filling.remove(request)
                self._keep(request, request.prompt, request.keys)
            else:
                request.followers.remove(one)
            one.row = self._cache.insert(request.keys)
            self._running[one.row] = one
            self._take(one, drawn, number)
        for request in computed:
            request.keys = request.hidden = None

    def _keep(self, request: Request, ids: Ids, keys: Tensor) -> None:
        """Put keys and values, [layers, 2, key heads, len(ids), head dim], into the prefix cache, as room allows."""
        if self._deterministic or request.version != self._versions[request.policy]:
            return
        cache = self._prefix(request.policy)
        others = sum(c.tokens for c in self._prefixes.values()) - cache.tokens
        cache.capacity = max(0, min(self._config.prefix_cache_tokens, self.budget - self._reserved - others))
        cache.insert(ids, keys)

    def _prefix(self, policy: str) -> PrefixCache:
        if policy not in self._prefixes:
            self._prefixes[policy] = PrefixCache(self._config.prefix_cache_tokens)
        return self._prefixes[policy]

    # Replies.

    def _decode(self) -> None:
        """One more token for every running reply."""
        if not self._running:
            return
        fault_point("during_generation")
        self._constrain()
        if not self._running:
            return
        for row in list(self._running):
            self._cache.make_room(row)
        buckets = self._cache.in_order()
        order = [self._running[row] for bucket in buckets for row in bucket.rows]
        ids = torch.tensor([request.last for request in order])
        positions = torch.tensor([row.length for bucket in buckets for row in bucket.rows])
        hidden = self._forward(ids, positions, DecodeAttend(buckets), [request.policy for request in order])
        drawn = self._draw(order, hidden[: len(order)])
        for number, request in enumerate(order):
            assert request.row is not None
            request.row.length += 1
            self._take(request, drawn, number)

    def _constrain(self) -> None:
        """Find which tokens may come next where replies have to match a grammar; end those that can't go on."""
        requests = [r for r in self._running.values() if r.matcher is not None]
        if self._advance is None or not requests:
            return
        errors = self._advance([r.matcher for r in requests if r.matcher is not None])
        for request, error in zip(requests, errors, strict=True):
            if error is not None:
                self._fail(request, error)

    def _forward(self, ids: Tensor, positions: Tensor, attend: Any, policies: Sequence[str]) -> Tensor:
        """Hidden states [N, hidden], of a few more rows where there are too few to round as many do."""
        lacking = self._min_rows - len(ids)
        if lacking > 0:
            ids = torch.cat((ids, ids[:1].expand(lacking)))
            positions = torch.cat((positions, positions[:1].expand(lacking)))
        self.passes += 1
        with self.adapters.applied(policies):
            return self._model.hidden(ids.to(self._device), positions.to(self._device), attend)

    def _draw(self, requests: Sequence[Request], hidden: Tensor) -> Drawn:
        """The next token of each request from its hidden state, [B, hidden]; changes nothing yet."""
        lacking = self._min_rows - len(hidden)
        rows = torch.cat((hidden, hidden[:1].expand(lacking, -1))) if lacking > 0 else hidden
        logits = self._model.logits(rows)[: len(requests)]
        return sample(logits, [self._how(request) for request in requests])

    def _how(self, request: Request) -> RowSampling:
        matcher = request.matcher
        return RowSampling(
            sampling=request.sampling,
            uniform=uniform(request.sampling.seed, len(request.reply)),
            banned=request.banned(self._stops),
            counts=request.counts,
            allowed=None if matcher is None else unpack_bits(mask_bits(matcher.mask), self._model.vocab_size),
        )

    def _take(self, request: Request, drawn: Drawn, number: int) -> None:
        """Add a token to a reply, and end it where it ends."""
        token = drawn.tokens[number]
        request.reply.append(token)
        self.sampled_tokens += 1
        if request.sampling.presence_penalty or request.sampling.frequency_penalty:
            request.counts[token] += 1
        if request.matcher is not None:
            request.matcher.accept(token)
        piece = SampledTokens(
            ids=(token,),
            logprobs=(drawn.logprobs[number],),
            version=self._versions[request.policy],
            top=(drawn.top[number],) if request.sampling.top_logprobs else (),
        )
        self._outbox.append((request, piece))
        if request.stops_at(token, self._stops):
            self._outbox.append((request, DONE))
            self._finish(request)

    def _finish(self, request: Request) -> None:
        """Free its place, and keep what was computed for whoever goes on from it."""
        row = request.row
        assert row is not None
        reply = np.array(request.reply[: row.length - len(request.prompt)], np.int32)
        keys = row.bucket.storage[:, :, row.index, :, : row.length]
        self._keep(request, np.concatenate((request.prompt, reply)), keys)
        self._cache.remove(row)
        del self._running[row]
        self._release(request)

    # Failures.

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request, with those that waited for its prompt."""
        for one in (request, *request.followers):
            self._outbox.append((one, _failure(error)))
            self._release(one)
        if request in self._filling:
            self._filling.remove(request)
        if request.row is not None:
            self._cache.remove(request.row)
            del self._running[request.row]

    def _survive(self, error: Exception) -> None:
        """Out of memory: the newest request fails, and the others go on. Anything else fails all that have begun."""
        newest = self._filling[-1:] or list(self._running.values())[-1:]
        if _out_of_memory(error) and newest:
            self._prefixes.clear()
            self._fail(newest[0], error)
            return
        self._fail_begun(error)

    def _fail_begun(self, error: Exception) -> None:
        """Every request that has begun fails; the next ones start from nothing."""
        begun = [*self._running.values(), *self._filling]
        self._outbox += [(one, _failure(error)) for request in begun for one in (request, *request.followers)]
        self._running.clear()
        self._filling.clear()
        self._reserved = 0
        self._cache = self._new_cache()
        self._prefixes.clear()

    def _new_cache(self) -> KVCache:
        m = self._model
        return KVCache(m.layers, m.key_heads, m.head_dim, self._dtype, self._device)


def _failure(error: Exception) -> PalestraError:
    """Return what the caller is told: a grammar over its bound is the request's fault, all else the engine's."""
    if isinstance(error, GrammarRefused):
        return error
    return EngineFailure(f"{type(error).__name__}: {error}")


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
