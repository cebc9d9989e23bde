"""The interface between a model's attention layers and the attention of the running forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute


class AttentionBackend(Protocol):
    """Computes one layer's attention over a flat batch of N tokens, and knows which tokens belong together."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return the attention output of each query head at each token, [N, H, D]; head h reads key head h // (H // K).

        Queries are [1, H, N, D], keys and values [1, K, N, D], all in the compute precision; `layer` counts from 0. A
        token attends to itself and the `window - 1` tokens before it; None: to all before it.
        """
        ...


class AttentionSlot:
    """State that the layers of one model share during a forward pass.

    Attributes:
        attention: the backend; None between passes.
        rotation: cosines and sines for rotary embedding, as given to the layers and as kernels use them; None between
            passes, and without kernels.
        shared_out: whether the weights are sharded over ranks, and whole only while transformers' own modules compute.
    """

    attention: AttentionBackend | None = None
    rotation: tuple[tuple[Tensor, Tensor], Tensor, Tensor] | None = None
    shared_out: bool = False

    def clear(self) -> None:
        """Drop the state of the pass."""
        self.attention = self.rotation = None


def recomputed(forward: Callable[..., Any], slot: AttentionSlot) -> Callable[..., Any]:
    """Wrap a layer's forward so that the backward pass recomputes it with the same attention."""

    def compute(*inputs: Any, **named: Any) -> Any:
        attention = slot.attention

        def again(*inputs: Any, **named: Any) -> Any:
            before = slot.attention, slot.rotation
            slot.attention = attention
            try:
                return forward(*inputs, **named)
            finally:
                slot.attention, slot.rotation = before

        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return recompute(again, *inputs, use_reentrant=False, **named)

    return compute


class TrialAttention:
    """Causal attention of one sequence that records which layers called it and the shape of their keys."""

    def __init__(self) -> None:
        self.shape = (0, 0)
        self.layers: set[int] = set()

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return causal attention, [N, H, D]; see `AttentionBackend`."""
        self.shape = (key.shape[1], key.shape[3])
        self.layers.add(layer)
        seen = torch.ones((key.shape[2], key.shape[2]), dtype=torch.bool, device=key.device).tril()
        if window is not None:
            seen = seen.triu(diagonal=1 - window)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
