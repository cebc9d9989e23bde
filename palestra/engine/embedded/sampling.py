"""Samples one token per row, without `multinomial`: over a large vocabulary that takes half as long as the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.types.calls import SAMPLING_RANGES, SamplingParams

_BLOCK = 256  # tokens: about as many as there are blocks in a usual vocabulary
_CUT_ROWS = 16  # rows that are sorted at the same time
_COLDEST = 1e-30  # temperature: less is not one in float32
# So many tokens are found for each row that asks for any: which of equal ones come first must not depend on the rows
# beside it.
_TOP = int(SAMPLING_RANGES["top_logprobs"][1])


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSampling:
    """Sampling parameters of one row's next token."""

    sampling: SamplingParams
    uniform: float  # in [0, 1): where the distribution function is inverted
    banned: Sequence[int] = ()  # token ids with probability 0
    counts: Mapping[int, int] = field(default_factory=dict)  # of the tokens that the reply has, for penalties
    allowed: Tensor | None = None  # [V] bool; None: all


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One token of each of B rows."""

    tokens: list[int]
    logprobs: list[float]  # natural logarithms, in the distribution that was sampled from; nan: the scores are none
    top: list[tuple[tuple[int, float], ...]]  # the most probable tokens in it, as many as were asked for


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> SampledBatch:
    """Invert each row's distribution function at its uniform number; temperature 0 takes the largest logit.

    The distribution is softmax((logits + bias - penalties) / temperature) over the allowed tokens in top k and top p.
    At temperature 0, reported probabilities are those of temperature 1 over all allowed tokens. Logits are [B, V], of
    any floating type.
    """
    scores = logits.float()
    changed = any(_changes(row) for row in rows)
    cut = [n for n, row in enumerate(rows) if row.sampling.temperature and _is_cut(row.sampling)]
    if (changed or cut) and scores is logits:
        scores = scores.clone()  # the caller's logits stay as they are
    if changed:
        _change(scores, rows)
    temperatures = [row.sampling.temperature for row in rows]
    if any(t not in (0.0, 1.0) for t in temperatures):
        scores = _tempered(scores, temperatures)
    for start in range(0, len(cut), _CUT_ROWS):
        _keep_top(scores, cut[start : start + _CUT_ROWS], [row.sampling for row in rows])
    weights = scores.softmax(dim=-1)  # row by row, unlike logsumexp, whose rounding depends on the number of rows
    drawn = _draw(weights, [row.uniform for row in rows])
    if not all(temperatures):
        greedy = torch.tensor([t == 0.0 for t in temperatures], device=scores.device)
        drawn = torch.where(greedy, scores.argmax(dim=-1), drawn)
    # The logarithm of the sum of exponents, without one more pass over the vocabulary: the largest weight is 1 / sum.
    largest, rest = scores.amax(dim=-1, keepdim=True), weights.amax(dim=-1, keepdim=True).log()
    picked = (scores.gather(1, drawn.unsqueeze(1)) - largest + rest).squeeze(1)
    return SampledBatch(drawn.tolist(), picked.tolist(), _top(scores, largest, rest, rows))


def _draw(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return each row's token at which the distribution function exceeds a uniform number, int64 [B].

    Sums are taken over blocks first, then token by token in one block: in float64 over the whole vocabulary they take
    as long as the rest of sampling.
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    ends = sums.cumsum(dim=-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device).unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, _below(target, ends), right=True).clamp_(max=blocks.shape[1] - 1)
    within = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, _BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    target -= ends.gather(1, block) - sums.gather(1, block)
    target.clamp_(min=0.0)  # rounding can make it negative, and then the search would find the block's first token
    found = block * _BLOCK + torch.searchsorted(within, _below(target, within), right=True)
    return found.squeeze(1).clamp_(max=weights.shape[1] - 1)  # of scores that are no numbers


def _below(target: Tensor, sums: Tensor) -> Tensor:
    """Return numbers [B, 1], each less than the last sum of its row [B, N] in spite of rounding."""
    return torch.minimum(target, torch.nextafter(sums[:, -1:], torch.zeros_like(target)))


def _tempered(scores: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return scores [B, V] by their rows' temperatures; rows with 0 or 1 keep their bits."""
    device, plain = scores.device, [t in (0.0, 1.0) for t in temperatures]
    largest = scores.amax(dim=-1, keepdim=True)  # taken off first, so that nothing overflows
    largest = largest.masked_fill(torch.tensor(plain, device=device).unsqueeze(1), 0.0)
    divisors = [1.0 if t == 0.0 else max(t, _COLDEST) for t in temperatures]
    return (scores - largest) / torch.tensor(divisors, device=device).unsqueeze(1)


def _changes(row: RowSampling) -> bool:
    s = row.sampling
    penalised = bool(row.counts) and bool(s.presence_penalty or s.frequency_penalty)
    return bool(row.banned or s.logit_bias) or penalised or row.allowed is not None


def _is_cut(sampling: SamplingParams) -> bool:
    return bool(sampling.top_k) or sampling.top_p < 1.0


def _change(scores: Tensor, rows: Sequence[RowSampling]) -> None:
    """Apply bias, penalties and exclusions to logits [B, V], in place, with few copies to a GPU."""
    bias, penalties = list[tuple[int, int, float]](), list[tuple[int, int, float]]()
    for number, row in enumerate(rows):
        s = row.sampling
        bias += [(number, token, value) for token, value in s.logit_bias]
        if s.presence_penalty or s.frequency_penalty:
            penalties += [
                (number, token, s.presence_penalty + s.frequency_penalty * count) for token, count in row.counts.items()
            ]
    for entries, sign in ((bias, 1.0), (penalties, -1.0)):
        if entries:
            at, tokens, values = zip(*entries, strict=True)
            where = torch.tensor((at, tokens), device=scores.device)
            scores[where[0], where[1]] += sign * torch.tensor(values, dtype=scores.dtype, device=scores.device)
    masks = {number: row.allowed for number, row in enumerate(rows) if row.allowed is not None}
    if masks:
        constrained = torch.tensor(list(masks), device=scores.device)
        scores[constrained] = scores[constrained].masked_fill(
            ~torch.stack(list(masks.values())).to(scores.device), -torch.inf
        )
    _exclude(scores, [(number, token) for number, row in enumerate(rows) for token in row.banned], masks)


def _exclude(scores: Tensor, banned: Sequence[tuple[int, int]], masks: Mapping[int, Tensor]) -> None:
    """Give tokens probability 0, unless a row's grammar allows only them."""
    if not banned:
        return
    at, tokens = torch.tensor(banned, device=scores.device).unbind(1)
    before = scores[at, tokens]
    scores[at, tokens] = -torch.inf
    if both := sorted(masks.keys() & {number for number, _ in banned}):
        left = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
        left[both] = torch.isfinite(scores[both]).any(dim=-1)
        scores[at, tokens] = torch.where(left[at], -torch.inf, before)


def _keep_top(scores: Tensor, numbers: Sequence[int], sampling: Sequence[SamplingParams]) -> None:
    """Exclude all but the most probable tokens."""
    device, size = scores.device, scores.shape[1]
    at = torch.tensor(numbers, device=device)
    ordered, places = scores[at].sort(dim=-1, descending=True, stable=True)
    most = torch.tensor([min(sampling[n].top_k or size, size) for n in numbers], device=device).unsqueeze(1)
    keep = torch.arange(size, device=device) < most
    top_p = torch.tensor([sampling[n].top_p for n in numbers], dtype=torch.float64, device=device).unsqueeze(1)
    probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1, dtype=torch.float64)
    keep &= (probabilities.cumsum(dim=-1) - probabilities < top_p) | (top_p >= 1.0)
    keep[:, 0] = True
    scores[at] = ordered.masked_fill(~keep, -torch.inf).gather(1, places.argsort(dim=-1))


def _top(
    scores: Tensor, largest: Tensor, rest: Tensor, rows: Sequence[RowSampling]
) -> list[tuple[tuple[int, float], ...]]:
    """Return ids and log-probabilities of each row's most probable tokens, best first, where requested."""
    found: list[tuple[tuple[int, float], ...]] = [() for _ in rows]
    asked = [number for number, row in enumerate(rows) if row.sampling.top_logprobs]
    if asked:
        at = torch.tensor(asked, device=scores.device)
        logprobs = scores[at] - largest[at] + rest[at]
        values, ids = logprobs.topk(min(_TOP, logprobs.shape[1]), dim=-1)
        for number, one, other in zip(asked, ids.tolist(), values.tolist(), strict=True):
            found[number] = tuple(zip(one, other, strict=True))[: rows[number].sampling.top_logprobs]
    return found
