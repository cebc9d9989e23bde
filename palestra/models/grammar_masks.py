"""Convert a tokenizer to what grammar processes need, and masks of tokens to tensors."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from palestra.grammars.process import GrammarVocabulary


def vocabulary_of(tokenizer: Any, vocab_size: int) -> GrammarVocabulary:
    """Return the vocabulary that grammar processes need, made from a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: number of tokens of the model, which may be larger than the tokenizer's.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return GrammarVocabulary(tokenizer=backend.to_str(), size=vocab_size, eos=tokenizer.eos_token_id)


def unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """Return a bool [..., V] mask for packed bits, int32 [..., B] with B = ceil(V / 32).

    Args:
        bits: the packed masks; bit i of a word is token 32 x (number of the word) + i.
        vocab_size: V.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)[..., :vocab_size]


def mask_bits(mask: bytes) -> Tensor:
    """Return the bytes of a mask as an int32 [B] tensor with B = ceil(V / 32)."""
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)
