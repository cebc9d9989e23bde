"""Logits: the most probable ones in float32, and masks of tokens as tensors."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn

# A logit of 16 to 32 is rounded to a multiple of 1/8 in bfloat16, which moves logprobs as far as all layers do. A head
# in float32 (MiniMax 2025, "MiniMax-M1", section 3.2) would make decoding on a CPU a fifth slower; computing the logits
# of the most probable tokens again costs 4 % (64 would cost 8 %), and has all but the tail of the distribution.
EXACT_LOGITS = 16
_BLOCK = 64  # tokens whose largest logit is found first
_EXACT_ROWS = 64  # positions whose weights of the head, [rows, EXACT_LOGITS, hidden], exist at the same time


class AdaptedHead(Protocol):
    """An output layer with weights [V, hidden] and low-rank products."""

    weight: nn.Parameter

    def products_at(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the low-rank products of rows `x`, [M, hidden], at tokens, int64 [M, K]: float32 [M, K]."""
        ...


def is_adapted(head: object) -> TypeGuard[AdaptedHead]:
    """Return whether an output layer has low-rank products.

    `isinstance` does not work: from Python 3.12 on it does not see a module's parameters.
    """
    return hasattr(head, "products_at")


class Correction(NamedTuple):
    """Corrections that make the largest logits of each row exact.

    Attributes:
        tokens: int64 [M, K].
        lacking: float32 [M, K], added to their logits.
    """

    tokens: Tensor
    lacking: Tensor


def sharpened(
    logits: Tensor,
    hidden: Tensor,
    head: nn.Linear | AdaptedHead,
    dtype: torch.dtype,
    corrections: list[Correction] | None = None,
) -> Tensor:
    """Replace the largest logits of each row, in place, by float32 products with the rounded weights.

    Logits are [M, V], hidden states [M, hidden], the head's weights [V, hidden], rounded to `dtype` for these logits.
    `corrections` are filled on the first call, and reused when the same logits are recomputed.
    """
    found = corrections[0] if corrections else _correction(logits, hidden, head, dtype)
    if corrections is not None and not corrections:
        corrections.append(found)
    return logits.scatter_add_(1, *found)


def _correction(logits: Tensor, hidden: Tensor, head: nn.Linear | AdaptedHead, dtype: torch.dtype) -> Correction:
    """Return the corrections of the largest logits; see `sharpened`."""
    bias = getattr(head, "bias", None)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        largest = _largest(logits)
        pieces = []
        for rows, tokens in zip(
            torch.split(hidden.float(), _EXACT_ROWS), torch.split(largest, _EXACT_ROWS), strict=True
        ):
            exact = (head.weight[tokens].to(dtype).float() * rows.unsqueeze(1)).sum(dim=-1)
            pieces.append(exact if bias is None else exact + bias[tokens].float())
        lacking = torch.cat(pieces) - logits.gather(1, largest) if pieces else logits.new_zeros(largest.shape)
        if is_adapted(head) and pieces:
            lacking += head.products_at(hidden.to(dtype), largest)
    return Correction(largest, lacking)


def _largest(logits: Tensor) -> Tensor:
    """Return the tokens of the `EXACT_LOGITS` largest logits of each row, int64 [M, K], for logits [M, V].

    Searching only the blocks of tokens with the largest maxima takes a tenth of the time.
    """
    rows, size = logits.shape
    whole, count = size // _BLOCK, min(EXACT_LOGITS, size)
    if whole <= count:
        return logits.topk(count, dim=-1).indices
    maxima = logits[:, : whole * _BLOCK].view(rows, whole, _BLOCK).amax(dim=-1)
    best = maxima.topk(count, dim=-1).indices
    tokens = (best.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    if whole * _BLOCK < size:  # the tokens behind the last block
        rest = torch.arange(whole * _BLOCK, size, device=logits.device).expand(rows, -1)
        tokens = torch.cat((tokens, rest), dim=1)
    return tokens.gather(1, logits.gather(1, tokens).topk(count, dim=-1).indices)


def unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """Return a bool [..., V] mask for packed bits, int32 [..., B] with B = ceil(V / 32). Bit i of word w is token 32 *
    w + i.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)[..., :vocab_size]


def mask_bits(mask: bytes) -> Tensor:
    """Return the bytes of a mask as an int32 [B] tensor with B = ceil(V / 32)."""
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)
