"""What stands behind the attention of a model's layers: the backend of the forward pass that is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute


class AttentionBackend(Protocol):
    """Computes the attention of one layer over a flat batch of N tokens; knows which tokens belong together."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return the attention output of each query head at each token, [N, H, D]; head h reads key head h // (H // K).

        Args:
            layer: number of the layer, from 0, by which a cache finds its keys and values.
            query: [1, H, N, D], in the compute precision, as keys and values.
            key: [1, K, N, D].
            value: [1, K, N, D].
            scale: factor of the scores before the softmax.
            window: a token sees itself and the `window - 1` tokens before it; None: all before it.
        """
        ...


class AttentionSlot:
    """Holds what the layers of one model have in common in the forward pass that is running.

    Attributes:
        attention: the backend; None between passes.
        rotation: cosines and sines that the layers were given for rotary embedding, and the same in the form in which
            kernels multiply by them; None between passes, and without kernels.
        shared_out: whether the model's weights are shared out over ranks, and whole only while transformers' own
            modules compute.
    """

    attention: AttentionBackend | None = None
    rotation: tuple[tuple[Tensor, Tensor], Tensor, Tensor] | None = None
    shared_out: bool = False

    def clear(self) -> None:
        """Forget the pass."""
        self.attention = self.rotation = None


def recomputed(forward: Callable[..., Any], slot: AttentionSlot) -> Callable[..., Any]:
    """Return a layer's forward pass that is computed again in the backward pass, with the attention that it had."""

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
    """Plain causal attention of one sequence, which records the layers that called it and the shape of their keys."""

    def __init__(self) -> None:
        self.shape = (0, 0)
        self.layers: set[int] = set()

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return plain causal attention, [N, H, D]; see `AttentionBackend`."""
        self.shape = (key.shape[1], key.shape[3])
        self.layers.add(layer)
        seen = torch.ones((key.shape[2], key.shape[2]), dtype=torch.bool, device=key.device).tril()
        if window is not None:
            seen = seen.triu(diagonal=1 - window)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
