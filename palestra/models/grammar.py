"""The tokens of a model as grammars need them, and masks of tokens as tensors."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from palestra.grammars.process import Vocabulary


def vocabulary_of(tokenizer: Any, vocab_size: int) -> Vocabulary:
    """Return what grammar processes need of a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: the model's, which may be larger.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return Vocabulary(tokenizer=backend.to_str(), size=vocab_size, eos=tokenizer.eos_token_id)


def unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """[…, ceil(V / 32)] int32 to [..., V] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)[..., :vocab_size]


def mask_bits(mask: bytes) -> Tensor:
    """[ceil(V / 32)] int32 from the bytes of a mask."""
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)
