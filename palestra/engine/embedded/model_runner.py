"""Runs a model's forward passes as the scheduler plans them, and owns the key-value cache of decoding.

Policies with adapters on one base share a runner and its passes. A row's result depends on other rows only through the
rounding of matrix products. A deterministic engine excludes that too: prompts are computed whole and alone, without
reuse; products have at least `MIN_ROWS` rows; and each adapter's rows are multiplied separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.engine.base import uniform
from palestra.engine.embedded.decode_graphs import graphs_for
from palestra.engine.embedded.kv_cache import (
    Bucket,
    DecodeAttention,
    KVCache,
    PrefillAttention,
    Row,
    capacity_for,
    wide_capacity_for,
)
from palestra.engine.embedded.request import RunningRequest
from palestra.engine.embedded.sampling import RowSampling, SampledBatch, sample
from palestra.errors import ModelError
from palestra.grammars.pool import Grammars
from palestra.models.adapter_stacks import Runs
from palestra.models.adapters import LORA_EMBEDDING
from palestra.models.causal_lm import CausalLM
from palestra.models.mixed_adapters import MIN_ROWS, MixedModel
from palestra.models.output_head import mask_bits, unpack_bits
from palestra.models.vision.vision import PlacedPicture, joined_positions
from palestra.types.calls import TokenSequence

if TYPE_CHECKING:
    from palestra.engine.embedded.scheduler import ServedPolicy

Placed = tuple[PlacedPicture, NDArray[np.int64]]  # with the row of each placeholder in a pass, -1: it is in none
SCORED_AT_ONCE = 256  # positions whose logits exist at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyModel:
    """What an engine needs to sample from a policy."""

    model: CausalLM  # the engine's own: `sync_weights` writes into those of its weights that are not shared
    stop_ids: frozenset[int]  # tokens that end a reply
    grammars: Grammars | None = None  # of the model's tokenizer; None: requests can't have one


class ModelRunner:
    """Prefills prompts, decodes replies and samples tokens, for one policy or several on one base.

    Attributes:
        model: a policy's own model, or the base.
    """

    def __init__(self, model: CausalLM, deterministic: bool) -> None:
        """Create a runner without policies. `deterministic`: results do not depend on the batch."""
        # Rows of adapters never see pictures, so a model that does has no passes in common with others.
        mixes = model.base is not None and model.vision is None
        self._mixed = (
            MixedModel(model.base, exact=deterministic, sampling=True) if mixes and model.base is not None else None
        )
        self.model = model if self._mixed is None else self._mixed.model
        self.policies: dict[str, ServedPolicy] = {}
        self.passes = self.prefilled_tokens = self.sampled_tokens = 0
        self._deterministic, self._min_rows = deterministic, MIN_ROWS if deterministic else 1
        self._device, self._dtype = self.model.device, self.model.compute_dtype
        self._graphs = None if deterministic else graphs_for(self._device)
        self._cache = self._new_cache()

    def runs(self, model: CausalLM) -> bool:
        """Return whether a policy with this model can be computed in the same passes."""
        return self._mixed is not None and model.base is self._mixed.base

    def refresh(self, policy: ServedPolicy) -> None:
        """Update the runner after a policy got new weights."""
        if self._mixed is not None and policy.model.adapter is not None:
            self._mixed.refresh(policy.model.adapter)

    def forget(self, name: str) -> None:
        """Drop a policy, its stacked matrices and its recorded passes."""
        policy = self.policies.pop(name)
        self._cache.forget(name)
        if self._mixed is not None and policy.model.adapter is not None:
            self._mixed.forget(policy.model.adapter)

    # Passes.

    def allocate_prompt(self, request: RunningRequest) -> None:
        """Allocate keys and values of a prompt, and copy those of a cached prefix."""
        m = self.model
        shape = (m.layers, 2, m.key_heads, len(request.prompt), m.head_dim)
        request.keys = torch.empty(shape, dtype=self._dtype, device=self._device)
        if not self._deterministic:  # at least one token is computed: its hidden state gives the first of the reply
            prefixes = self.policies[request.policy].prefixes
            request.prefilled = prefixes.copy_into(request.keys, request.prompt[:-1])

    def prefill(self, pieces: Sequence[tuple[RunningRequest, int]]) -> None:
        """Compute the next tokens of some prompts, and the last hidden state of each completed one. Each request comes
        with the number of further prompt tokens to compute.
        """
        parts = [r.prompt.ids[r.prefilled : r.prefilled + n].astype(np.int64) for r, n in pieces]
        ids = torch.cat([torch.from_numpy(part) for part in parts])
        for request, _ in pieces:
            if request.positions is None:
                request.positions = self.model.positions(request.asked.prompt)
        positions = joined_positions(
            [r.positions[..., r.prefilled : r.prefilled + n] for r, n in pieces if r.positions is not None]
        )
        attention = PrefillAttention([(r.keys, r.prefilled, n) for r, n in pieces if r.keys is not None])
        pictures, end = list[Placed](), 0
        for request, new in pieces:
            pictures += self._placed(request.asked.prompt, request.prefilled, new, end)
            end += new
        hidden = self._forward(ids, positions, attention, [(r.policy, n) for r, n in pieces], pictures)
        end = 0
        for request, new in pieces:
            end += new
            request.prefilled += new
            if not request.remaining:
                request.hidden = hidden[end - 1]
        self.prefilled_tokens += end

    def decode(self, requests: Sequence[RunningRequest]) -> tuple[Sequence[RunningRequest], SampledBatch]:
        """Compute the newest token of each reply and sample the next one; return both in the same order.

        A failure leaves all replies unchanged. The requests are all that have a row, or one of them alone.
        """
        by_row = {request.row: request for request in requests if request.row is not None}
        for row in by_row:
            self._cache.free_capacity(row)
        buckets = self._cache.in_order()
        rows = [row for bucket in buckets for row in bucket.rows]
        if len(rows) == len(requests):
            order: Sequence[RunningRequest] = [by_row[row] for row in rows]
            scores = self._next_scores(buckets, order)
        else:
            (row,), order = by_row, requests
            with row.alone() as attention:
                scores = self._launched(order, attention)
        sampled = self._sampled(order, scores)
        for row in by_row:
            row.length += 1
            row.position += 1
        return order, sampled

    def _next_scores(self, buckets: Sequence[Bucket], order: Sequence[RunningRequest]) -> Tensor:
        """Compute the newest tokens of all rows of some buckets; returns scores of all tokens, float32 [rows, V]."""
        if self._graphs is None:
            return self._launched(order, DecodeAttention.of(buckets))
        pieces, start = list[Tensor](), 0
        for bucket in buckets:
            own = order[start : start + len(bucket.rows)]
            start += len(own)
            found = None
            if len({request.policy for request in own}) == 1:  # others are grouped for each pass
                compute = partial(self._computed, own[0].policy)
                found = self._graphs.scores(bucket, own[0].policy, [request.last for request in own], compute)
                self.passes += found is not None
            pieces.append(self._launched(own, DecodeAttention.of([bucket])) if found is None else found)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _launched(self, order: Sequence[RunningRequest], attention: DecodeAttention) -> Tensor:
        """Compute a pass without a graph: the newest tokens of replies, in the order of `attention`'s rows."""
        ids = torch.tensor([request.last for request in order])
        positions = torch.tensor([request.row.position for request in order if request.row is not None])
        hidden = self._forward(ids, positions, attention, [(request.policy, 1) for request in order])
        return self._scores(order, hidden[: len(order)])

    def _computed(self, policy: str, ids: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """Return the scores of all tokens behind R tokens of one policy, float32 [R, V]; see `Pass`."""
        rows = [(policy, len(ids))]
        return self._logits(self._hidden(ids, positions, attention, rows), rows)

    def sample(self, requests: Sequence[RunningRequest], hidden: Tensor) -> SampledBatch:
        """Sample the next token of B requests from hidden states [B, hidden], without changing the requests."""
        return self._sampled(requests, self._scores(requests, hidden))

    def _scores(self, requests: Sequence[RunningRequest], hidden: Tensor) -> Tensor:
        """Return the scores of all tokens, float32 [B, V], for hidden states [B, hidden] of B requests."""
        lacking = self._min_rows - len(hidden)
        rows = torch.cat((hidden, hidden[:1].expand(lacking, -1))) if lacking > 0 else hidden
        return self._logits(rows, [(request.policy, 1) for request in requests])[: len(requests)]

    def _sampled(self, requests: Sequence[RunningRequest], scores: Tensor) -> SampledBatch:
        """Sample a token of each of B requests from scores [B, V]."""
        sampled = sample(scores, [self._row_sampling(request) for request in requests])
        self.sampled_tokens += len(requests)
        return sampled

    def score(self, policy: str, prompt: TokenSequence, piece: int | None) -> list[float]:
        """Return the log-probability of each prompt token but the first, at temperature 1, [P - 1]. `prompt` has [P]
        ids and their pictures; a pass has at most `piece` tokens, None: all, as in a deterministic engine.
        """
        m, ids, length = self.model, prompt.ids, len(prompt.ids)
        size = length if piece is None or self._deterministic else piece
        keys = torch.empty((m.layers, 2, m.key_heads, length, m.head_dim), dtype=self._dtype, device=self._device)
        tokens, found = torch.from_numpy(ids.astype(np.int64)), list[float]()
        positions = self.model.positions(prompt)
        for start in range(0, length, size):
            end = min(start + size, length)
            attention = PrefillAttention([(keys, start, end - start)])
            runs, pictures = [(policy, end - start)], self._placed(prompt, start, end - start, 0)
            hidden = self._forward(tokens[start:end], positions[..., start:end], attention, runs, pictures)
            hidden = hidden[: end - start]
            targets = tokens[start + 1 : end + 1].to(self._device)  # one less than hidden states at the end
            for first in range(0, len(targets), SCORED_AT_ONCE):
                chosen = targets[first : first + SCORED_AT_ONCE]
                logits = self._logits(hidden[first : first + len(chosen)], [(policy, len(chosen))])
                found += logits.log_softmax(dim=-1).gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
        return found

    def _placed(self, prompt: TokenSequence, first: int, count: int, row: int) -> list[Placed]:
        """Return the pictures of a prompt with the rows of their placeholders in a pass."""
        vision = self.model.vision
        if vision is None or not prompt.media:
            return []
        found = list[Placed]()
        for picture in vision.placed(*prompt):
            at = picture.positions - first
            found.append((picture, np.where((at >= 0) & (at < count), at + row, -1)))
        return found

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: Any,
        policies: Sequence[tuple[str, int]],
        pictures: Sequence[Placed] = (),
    ) -> Tensor:
        """Return the hidden states of N tokens, [N, hidden], and of a few more where N are too few to round as many."""
        lacking = self._min_rows - len(ids)
        if lacking > 0:
            ids = torch.cat((ids, ids[:1].expand(lacking)))
            positions = torch.cat((positions, positions[..., :1].expand(*positions.shape[:-1], lacking)), dim=-1)
        self.passes += 1
        return self._hidden(ids.to(self._device), positions.to(self._device), attention, policies, lacking, pictures)

    def _hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: Any,
        policies: Sequence[tuple[str, int]],
        lacking: int = 0,
        pictures: Sequence[Placed] = (),
    ) -> Tensor:
        """Return the hidden states of N tokens on the device, [N, hidden]; see `_forward`."""
        if self._mixed is None:
            return self.model.hidden(ids, positions, attention, self.model.picture_rows(pictures))
        return self._mixed.hidden(ids, positions, attention, self._runs(policies, lacking))

    def _logits(self, hidden: Tensor, policies: Sequence[tuple[str, int]]) -> Tensor:
        """Return the scores of all tokens, float32 [M, V], for hidden states [M, hidden]."""
        if self._mixed is None:
            return self.model.logits(hidden)
        return self._mixed.logits(hidden, self._runs(policies, len(hidden) - sum(count for _, count in policies)))

    def _runs(self, policies: Sequence[tuple[str, int]], lacking: int) -> Runs:
        """Return (adapter, number of rows) in order; `lacking` rows are padded with copies of the first."""
        more = [(policies[0][0], lacking)] if lacking > 0 else []
        return [(self.policies[name].model.adapter, count) for name, count in (*policies, *more)]

    def _row_sampling(self, request: RunningRequest) -> RowSampling:
        matcher = request.matcher
        return RowSampling(
            sampling=request.sampling,
            uniform=uniform(request.sampling.seed, len(request.reply)),
            banned=request.banned(self.policies[request.policy].stops),
            counts=request.counts,
            allowed=None if matcher is None else unpack_bits(mask_bits(matcher.mask), self.model.vocab_size),
        )

    # Keys and values.

    def add_row(self, keys: Tensor, positions: Tensor | None) -> Row:
        """Add a reply. `keys` are keys and values of its prompt, [layers, 2, key heads, P, head dim]; `positions` are
        [P] or [3, P].
        """
        assert positions is not None
        return self._cache.insert(keys, int(positions.max()) + 1)

    def remove_row(self, row: Row) -> None:
        """Drop the keys and values of a reply."""
        self._cache.remove(row)

    def capacity(self, length: int) -> int:
        """Return the bucket size for a reply of `length` positions."""
        return self._cache.capacity(length)

    def free_unused(self) -> None:
        """Free cached empty buckets."""
        self._cache.drop_empty()

    def clear(self) -> None:
        """Drop all keys and values, after a failure that may have left them incomplete."""
        self._cache = self._new_cache()
        for policy in self.policies.values():
            policy.prefixes.clear()

    def _new_cache(self) -> KVCache:
        m = self.model
        capacity, kept = (capacity_for, 0) if self._graphs is None else (wide_capacity_for, self._graphs.kept_bytes)
        return KVCache(m.layers, m.key_heads, m.head_dim, self._dtype, self._device, capacity, kept)


@torch.inference_mode()
def check_determinism(model: CausalLM, max_batch: int) -> None:
    """Raise ModelError if this machine's matrix products depend on the number of rows.

    Prompts run alone, so only the products of decoding, with `MIN_ROWS` to `max_batch` rows, are tested: all layers'
    weights once, on random input.
    """
    generator = torch.Generator().manual_seed(0)
    for name, width, product in _products(model, max_batch, generator):
        rows = torch.randn((max_batch, width), generator=generator).to(model.device, model.compute_dtype)
        whole = product(rows)
        for count in {n for n in (MIN_ROWS, MIN_ROWS + 1, max_batch // 2, max_batch - 1) if MIN_ROWS <= n <= max_batch}:
            if not torch.equal(product(rows[:count]), whole[:count]):
                rank = "another rank of the adapter, " if ".lora_" in name else ""
                raise ModelError(
                    f"deterministic = true is not possible here: {name} gives other bits for {count} rows than "
                    f"for {max_batch}; set {rank}engine.dtype = 'float32', or engine.threads = 1, and let nothing be "
                    "computed in this process before the job is started"
                )


def _products(
    model: CausalLM, rows: int, draw: torch.Generator
) -> Iterator[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """Yield each product of a model's layers: its name, the width of its input, and a function of rows [N, width]."""
    for name, weight in model.named_parameters():
        if model.vision is not None and model.vision.owns(name):  # one picture a pass, always of the same shape
            continue
        if weight.ndim == 2 and not name.endswith(LORA_EMBEDDING[0]):  # of which columns are read, and none multiplied
            yield name, weight.shape[1], partial(_multiplied, weight)
    for packed in model.packed or ():
        yield " and ".join(packed.names), packed.width, packed.whole_product
    for name, layer in model.adapter.layers.items() if model.adapter is not None else ():
        added = torch.randn((rows, len(layer.lora_B.weight)), generator=draw).to(layer.weight)
        matrix = torch.randn(layer.lora_B.weight.shape, generator=draw).to(layer.lora_B.weight)
        yield f"{name}.lora_B.weight", matrix.shape[1], partial(_added, added, matrix)
    for name, embedding in model.adapter.embedding.items() if model.adapter is not None else ():
        added = torch.randn((rows, len(embedding.lora_embedding_B)), generator=draw).to(embedding.weight)
        matrix = embedding.lora_embedding_B
        yield f"{name}.lora_embedding_B", matrix.shape[1], partial(_added, added, matrix)


def _multiplied(weight: Tensor, rows: Tensor) -> Tensor:
    """Return the product of a linear layer, [N, out], for rows [N, in]."""
    return torch.nn.functional.linear(rows, weight)


def _added(out: Tensor, matrix: Tensor, low: Tensor) -> Tensor:
    """Return the sum [N, out] that a layer with an adapter computes, see `LoraLinear.add_product`."""
    return torch.addmm(out[: len(low)], low, matrix.t())
