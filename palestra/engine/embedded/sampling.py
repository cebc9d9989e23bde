"""Sample one token a row, without `multinomial`, which takes half as long as the model over a large vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.types.calls import SamplingParams

_BLOCK = 256  # tokens: about as many as there are blocks in a usual vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSampling:
    """How the next token of one row is sampled."""

    sampling: SamplingParams
    uniform: float  # in [0, 1): where the distribution function is inverted
    banned: Sequence[int] = ()  # token ids with probability 0
    counts: Mapping[int, int] = field(default_factory=dict)  # of the tokens that the reply has, for penalties
    allowed: Tensor | None = None  # [V] bool; None: all


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One token of each of B rows."""

    tokens: list[int]
    logprobs: list[float]  # natural logarithms, in the distribution that was sampled from
    top: list[tuple[tuple[int, float], ...]]  # the most probable tokens in it, as many as were asked for


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> SampledBatch:
    """Invert each row's distribution function at its uniform number; temperature 0 takes the largest score.

    The distribution is softmax of (logits + bias - penalties) / temperature over the tokens that are allowed and in
    the top k and top p; at temperature 0 that of temperature 1 over all that are allowed.

    Args:
        logits: [B, V], any floating type.
        rows: B rows.
    """
    scores = logits.float()
    if any(_changes(row) for row in rows):
        scores = scores.clone()  # the caller's logits stay as they are
        for number, row in enumerate(rows):
            _change(scores[number], row)
    temperatures = [row.sampling.temperature for row in rows]
    if any(t not in (0.0, 1.0) for t in temperatures):
        scores = scores / torch.tensor([t or 1.0 for t in temperatures]).to(scores.device).unsqueeze(1)
    for number, row in enumerate(rows):
        if row.sampling.temperature and (row.sampling.top_k or row.sampling.top_p < 1.0):
            scores = scores.clone() if scores is logits else scores
            _keep_top(scores[number], row.sampling.top_k, row.sampling.top_p)
    weights = scores.softmax(dim=-1)  # row by row, unlike logsumexp, whose rounding depends on the number of rows
    drawn = _draw(weights, [row.uniform for row in rows])
    if not all(temperatures):
        greedy = torch.tensor([t == 0.0 for t in temperatures], device=scores.device)
        drawn = torch.where(greedy, scores.argmax(dim=-1), drawn)
    # The logarithm of the sum of exponents, without one more pass over the vocabulary: the largest weight is 1 / sum.
    sums = scores.amax(dim=-1) - weights.amax(dim=-1).log()
    picked = scores.gather(1, drawn.unsqueeze(1)).squeeze(1) - sums
    top = [_top(scores[n] - sums[n], row) if row.sampling.top_logprobs else () for n, row in enumerate(rows)]
    return SampledBatch(drawn.tolist(), picked.tolist(), top)


def _draw(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return the token of each row at which the distribution function exceeds a uniform number, int64 [B].

    The function is added up over blocks of tokens first, and token by token in one block alone: over the whole
    vocabulary in float64 it takes as long as all the rest of sampling.

    Args:
        weights: probabilities, float32 [B, V].
        uniforms: B numbers in [0, 1).
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    ends = sums.cumsum(dim=-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device).unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, _below(target, ends), right=True)
    within = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, _BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    target -= ends.gather(1, block) - sums.gather(1, block)
    found = block * _BLOCK + torch.searchsorted(within, _below(target, within), right=True)
    return found.squeeze(1)


def _below(target: Tensor, sums: Tensor) -> Tensor:
    """Return numbers [B, 1] of which each is less than the last sum of its row [B, N], in spite of rounding."""
    return torch.minimum(target, torch.nextafter(sums[:, -1:], torch.zeros_like(target)))


def _changes(row: RowSampling) -> bool:
    s = row.sampling
    penalised = bool(row.counts) and bool(s.presence_penalty or s.frequency_penalty)
    return bool(row.banned or s.logit_bias) or penalised or row.allowed is not None


def _change(scores: Tensor, row: RowSampling) -> None:
    """Apply bias, penalties and exclusions to one row, [V], in place."""
    s = row.sampling
    if s.logit_bias:
        ids, biases = zip(*s.logit_bias, strict=True)
        scores[list(ids)] += torch.tensor(biases, dtype=scores.dtype, device=scores.device)
    if row.counts and (s.presence_penalty or s.frequency_penalty):
        counts = torch.tensor(list(row.counts.values()), dtype=scores.dtype, device=scores.device)
        scores[list(row.counts)] -= s.presence_penalty + s.frequency_penalty * counts
    if row.allowed is not None:
        scores.masked_fill_(~row.allowed.to(scores.device), float("-inf"))
    if row.banned:
        banned = list(row.banned)
        kept = scores[banned].clone()
        scores[banned] = float("-inf")
        if row.allowed is not None and not torch.isfinite(scores).any():  # the grammar allows nothing else
            scores[banned] = kept


def _keep_top(scores: Tensor, top_k: int, top_p: float) -> None:
    """Exclude all but the most probable tokens of one row, [V], in place."""
    ordered, places = scores.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        keep[top_k:] = False
    if top_p < 1.0:
        probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= probabilities.cumsum(-1) - probabilities < top_p
    keep[0] = True
    scores[places[~keep]] = float("-inf")


def _top(logprobs: Tensor, row: RowSampling) -> tuple[tuple[int, float], ...]:
    """Return ids and log-probabilities of the most probable tokens of one row, [V], best first."""
    values, ids = logprobs.topk(min(row.sampling.top_logprobs, len(logprobs)))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
