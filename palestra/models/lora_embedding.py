"""LoRA for token embeddings, with PEFT's names and shapes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.config import AdapterConfig

LORA_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")  # names of the matrices in the embedding


class LoraEmbedding:
    """A low-rank product next to an embedding: token t has W[t] + scale B A[:, t].

    The matrices are parameters of the embedding itself, and a hook adds the product, so that an embedding that scales
    its output, as Gemma's does, scales the product too.

    Attributes:
        weight: the embedding's, [V, d], shared with all models on the same base.
        lora_embedding_A: [r, V].
        lora_embedding_B: [d, r].
    """

    def __init__(self, layer: nn.Embedding, config: AdapterConfig) -> None:
        """Add float32 matrices to an embedding; they are not initialised yet."""
        (count, width), place = layer.weight.shape, filled_device(layer.weight)
        self.weight = layer.weight
        self.lora_embedding_A = nn.Parameter(torch.empty((config.rank, count), device=place))
        self.lora_embedding_B = nn.Parameter(torch.empty((width, config.rank), device=place))
        self.scale = config.scale * embedding_factor(layer)
        for name, matrix in self.named_parameters():
            layer.register_parameter(name, matrix)
        # Before the hook of `CausalLM` that rounds embeddings: the sum is rounded once.
        layer.register_forward_hook(self._added, prepend=True)

    def add_product(self, out: Tensor, ids: Tensor) -> Tensor:
        """Return `out`, [N, d], plus the low-rank product of `ids`, [N]."""
        low = F.embedding(ids, self.lora_embedding_A.t()).to(self.weight.dtype) * self.scale
        return torch.addmm(out, low, self.lora_embedding_B.t())

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return both matrices by their names in the embedding."""
        return list(zip(LORA_EMBEDDING, (self.lora_embedding_A, self.lora_embedding_B), strict=True))

    def fill(self, draw: torch.Generator) -> None:
        """Set A to zero and draw B from a normal distribution, as PEFT does."""
        with torch.no_grad():
            self.lora_embedding_A.zero_()
            self.lora_embedding_B.copy_(torch.empty(self.lora_embedding_B.shape).normal_(generator=draw))

    def _added(self, _layer: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        """Return embeddings, [..., d], with the product for token ids, [...]."""
        return self.add_product(out.flatten(0, -2), inputs[0].flatten()).view(out.shape)


def filled_device(weight: Tensor) -> torch.device:
    """Return the device for matrices next to a weight, [n, d]: the weight's, or the CPU while it is on
    the meta device.
    """
    return torch.device("cpu") if weight.is_meta else weight.device


def embedding_factor(layer: nn.Embedding) -> float:
    """Return the factor by which an embedding multiplies its weights; 1 for most models."""
    factor = getattr(layer, "embed_scale", 1.0)
    return float(factor.to(layer.weight.dtype) if isinstance(factor, Tensor) else factor)
