"""Masks of tokens as tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """Return a bool [..., V] mask for packed bits, int32 [..., B] with B = ceil(V / 32).

    Args:
        bits: bit i of word w is token 32 * w + i.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)[..., :vocab_size]


def mask_bits(mask: bytes) -> Tensor:
    """Return the bytes of a mask as an int32 [B] tensor with B = ceil(V / 32)."""
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)
