"""One policy's model: it computes the passes that the scheduler plans, and has the policy's keys and values.

What a row gets never depends on the rows beside it, except through the rounding of matrix products; in a deterministic
engine that is excluded, too: prompts are computed whole and alone, no matter what was computed before, and products
have at least `MIN_ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.engine.embedded.attention import DecodeAttention, PrefillAttention
from palestra.engine.embedded.kv_cache import KVCache, Row, capacity_for
from palestra.engine.embedded.prefix_cache import PrefixCache
from palestra.engine.embedded.request import Request
from palestra.engine.embedded.sampling import RowSampling, SampledBatch, sample
from palestra.engine.rng import uniform
from palestra.errors import ModelError, PalestraError
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import CausalLM
from palestra.models.grammar_masks import mask_bits, unpack_bits
from palestra.models.weights import WeightSource
from palestra.tokens import TokenRun
from palestra.types.calls import Ids, PolicyVersion

SCORED_AT_ONCE = 256  # positions whose logits exist at the same time
MIN_ROWS = 4  # products of fewer rows take another way through the processor, and round differently


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyModel:
    """What an engine needs to sample from a policy."""

    model: CausalLM  # the engine's own: `sync_weights` writes into those of its weights that are not shared
    stop_ids: frozenset[int]  # tokens that end a reply
    grammars: Grammars | None = None  # of the model's tokenizer; None: requests can't have one


class ModelRunner:
    """Prefills prompts, decodes replies and samples tokens, for one policy."""

    def __init__(self, policy: PolicyModel, version: PolicyVersion, prefix_tokens: int, deterministic: bool) -> None:
        """Prepare to run a policy's model.

        Args:
            policy: the model, and what ends its replies.
            version: of its present weights.
            prefix_tokens: the most tokens whose keys and values are kept for prompts to come.
            deterministic: whether results must not depend on what is computed beside them.
        """
        self.model, self.stops, self._grammars = policy.model, policy.stop_ids, policy.grammars
        self.version = version
        self.prefixes = PrefixCache(prefix_tokens)
        self.prefix_tokens = prefix_tokens
        self.passes = self.prefilled_tokens = self.sampled_tokens = 0
        self._deterministic, self._min_rows = deterministic, MIN_ROWS if deterministic else 1
        self._device, self._dtype = self.model.device, self.model.compute_dtype
        self._cache = self._new_cache()

    def longest_bytes(self, request: Request) -> int:
        """Return the bytes of keys and values that a request's longest reply needs."""
        length = len(request.prompt)
        longest = min(length + request.sampling.max_tokens, self.model.max_positions)
        return capacity_for(max(longest, length + 1)) * self.model.token_bytes

    # Passes.

    def allocate_prompt(self, request: Request) -> None:
        """Make room for the keys and values of a prompt, and copy those that an earlier prompt has left."""
        m = self.model
        shape = (m.layers, 2, m.key_heads, len(request.prompt), m.head_dim)
        request.keys = torch.empty(shape, dtype=self._dtype, device=self._device)
        if not self._deterministic:  # at least one token is computed: its hidden state gives the first of the reply
            request.prefilled = self.prefixes.copy_into(request.keys, request.prompt[:-1])

    def prefill(self, pieces: Sequence[tuple[Request, int]]) -> None:
        """Compute the next tokens of some prompts; a prompt that is complete then has its last hidden state.

        Args:
            pieces: requests, each with how many further tokens of its prompt to compute.
        """
        parts = [r.prompt.ids[r.prefilled : r.prefilled + n].astype(np.int64) for r, n in pieces]
        ids = torch.cat([torch.from_numpy(part) for part in parts])
        positions = torch.cat([torch.arange(r.prefilled, r.prefilled + n) for r, n in pieces])
        attention = PrefillAttention([(r.keys, r.prefilled, n) for r, n in pieces if r.keys is not None])
        hidden = self._forward(ids, positions, attention)
        end = 0
        for request, new in pieces:
            end += new
            request.prefilled += new
            if not request.remaining:
                request.hidden = hidden[end - 1]
        self.prefilled_tokens += end

    def decode(self, requests: Sequence[Request]) -> tuple[list[Request], SampledBatch]:
        """Compute the newest token of each reply and sample the one after it; returns both in the same order."""
        by_row = {request.row: request for request in requests}
        for row in by_row:
            assert row is not None
            self._cache.make_room(row)
        buckets = self._cache.in_order()
        rows = [row for bucket in buckets for row in bucket.rows]
        order = [by_row[row] for row in rows]
        ids = torch.tensor([request.last for request in order])
        positions = torch.tensor([row.length for row in rows])
        hidden = self._forward(ids, positions, DecodeAttention(buckets))
        sampled = self.sample(order, hidden[: len(order)])
        for row in rows:
            row.length += 1
        return order, sampled

    def sample(self, requests: Sequence[Request], hidden: Tensor) -> SampledBatch:
        """Sample the next token of B requests from their hidden states, [B, hidden]; the requests stay as they are."""
        lacking = self._min_rows - len(hidden)
        rows = torch.cat((hidden, hidden[:1].expand(lacking, -1))) if lacking > 0 else hidden
        logits = self.model.logits(rows)[: len(requests)]
        self.sampled_tokens += len(requests)
        return sample(logits, [self._row_sampling(request) for request in requests])

    def score(self, ids: Ids, piece: int | None) -> list[float]:
        """Return the log-probability of each token of a prompt but the first, at temperature 1, [P - 1].

        Args:
            ids: int32 [P].
            piece: the most tokens of a pass; None: all, as in a deterministic engine.
        """
        m, length = self.model, len(ids)
        size = length if piece is None or self._deterministic else piece
        keys = torch.empty((m.layers, 2, m.key_heads, length, m.head_dim), dtype=self._dtype, device=self._device)
        tokens, found = torch.from_numpy(ids.astype(np.int64)), list[float]()
        for start in range(0, length, size):
            end = min(start + size, length)
            attention = PrefillAttention([(keys, start, end - start)])
            hidden = self._forward(tokens[start:end], torch.arange(start, end), attention)[: end - start]
            targets = tokens[start + 1 : end + 1].to(self._device)  # one less than hidden states at the end
            for first in range(0, len(targets), SCORED_AT_ONCE):
                chosen = targets[first : first + SCORED_AT_ONCE]
                logits = self.model.logits(hidden[first : first + len(chosen)]).float()
                found += logits.log_softmax(dim=-1).gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
        return found

    def advance_grammars(self, requests: Sequence[Request]) -> list[PalestraError | None]:
        """Find which tokens may come next in replies with a grammar; returns an error for each that has no next one."""
        assert self._grammars is not None
        return self._grammars.advance([r.matcher for r in requests if r.matcher is not None])

    def _forward(self, ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        """Return the hidden states of N tokens, [N, hidden], and of a few more where N are too few to round as many."""
        lacking = self._min_rows - len(ids)
        if lacking > 0:
            ids = torch.cat((ids, ids[:1].expand(lacking)))
            positions = torch.cat((positions, positions[:1].expand(lacking)))
        self.passes += 1
        return self.model.hidden(ids.to(self._device), positions.to(self._device), attention)

    def _row_sampling(self, request: Request) -> RowSampling:
        matcher = request.matcher
        return RowSampling(
            sampling=request.sampling,
            uniform=uniform(request.sampling.seed, len(request.reply)),
            banned=request.banned(self.stops),
            counts=request.counts,
            allowed=None if matcher is None else unpack_bits(mask_bits(matcher.mask), self.model.vocab_size),
        )

    # Keys and values.

    def add_row(self, keys: Tensor) -> Row:
        """Add a reply that starts with a prompt's keys and values, [layers, 2, key heads, P, head dim]."""
        return self._cache.insert(keys)

    def remove_row(self, row: Row) -> None:
        """Forget the keys and values of a reply."""
        self._cache.remove(row)

    def keep_prefix(self, tokens: TokenRun, keys: Tensor, room: int) -> None:
        """Keep keys and values for prompts to come.

        Args:
            tokens: [N].
            keys: [layers, 2, key heads, N, head dim], those of the tokens.
            room: how many tokens the prefixes of the policy may have in all.
        """
        if not self._deterministic:
            self.prefixes.capacity = min(self.prefix_tokens, room)
            self.prefixes.insert(tokens, keys)

    def clear(self) -> None:
        """Forget all keys and values, after a failure that may have left them incomplete."""
        self._cache = self._new_cache()
        self.prefixes.clear()

    def _new_cache(self) -> KVCache:
        m = self.model
        return KVCache(m.layers, m.key_heads, m.head_dim, self._dtype, self._device)

    # Weights.

    def load_weights(self, version: PolicyVersion, source: WeightSource) -> None:
        """Copy new weights into the model, all or none, and forget the prefixes that the old ones made.

        Raises:
            ModelError: a weight is missing, unknown, or has another shape.
        """
        own = dict(self.model.own_parameters())
        given = dict(source.tensors())
        for name, tensor in given.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ModelError(f"the engine's model has no weight {name} of shape {tuple(tensor.shape)}")
        if missing := own.keys() - given.keys():
            raise ModelError(f"no new weights were given for {', '.join(sorted(missing))}")
        for name, tensor in given.items():
            own[name].copy_(tensor)
        self.version = version
        self.prefixes.clear()


@torch.inference_mode()
def check_determinism(model: CausalLM, max_batch: int) -> None:
    """Refuse to call results reproducible where this machine's matrix products say otherwise.

    A row must come out the same beside any number of other rows. Prompts run alone, so only the products of decoding,
    with `MIN_ROWS` to `max_batch` rows, are tried: all layers' weights once, on random input.

    Args:
        model: whose weights are multiplied.
        max_batch: the most replies that are decoded at the same time.

    Raises:
        ModelError: a product gives other bits for another number of rows.
    """
    generator = torch.Generator().manual_seed(0)
    for name, width, product in _products(model, max_batch, generator):
        rows = torch.randn((max_batch, width), generator=generator).to(model.device, model.compute_dtype)
        whole = product(rows)
        for count in {n for n in (MIN_ROWS, MIN_ROWS + 1, max_batch // 2, max_batch - 1) if MIN_ROWS <= n <= max_batch}:
            if not torch.equal(product(rows[:count]), whole[:count]):
                raise ModelError(
                    f"deterministic = true is not possible here: {name} gives other bits for {count} rows than "
                    f"for {max_batch}; set engine.dtype = 'float32', or engine.threads = 1"
                )


def _products(
    model: CausalLM, rows: int, draw: torch.Generator
) -> Iterator[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """Yield each product of a model's layers: its name, the width of its input, and a function of rows.

    Args:
        model: whose weights are multiplied.
        rows: the most rows that a function will get.
        draw: of matrices in place of an adapter's, which are zero at first.
    """
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            yield name, weight.shape[1], partial(_multiplied, weight)
    for name, layer in model.adapter.layers.items() if model.adapter is not None else ():
        added = torch.randn((rows, len(layer.lora_B.weight)), generator=draw).to(layer.weight)
        matrix = torch.randn(layer.lora_B.weight.shape, generator=draw).to(layer.lora_B.weight)
        yield f"{name}.lora_B.weight", matrix.shape[1], partial(_added, added, matrix)


def _multiplied(weight: Tensor, rows: Tensor) -> Tensor:
    """Return the product of a linear layer, [N, out], for rows [N, in]."""
    return torch.nn.functional.linear(rows, weight)


def _added(out: Tensor, matrix: Tensor, low: Tensor) -> Tensor:
    """Return the sum that a layer with an adapter computes, see `LoraLinear.add_product`."""
    return torch.addmm(out[: len(low)], low, matrix.t())
