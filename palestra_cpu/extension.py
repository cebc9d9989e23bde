"""The entry point: CPU kernels for the torch versions they are written for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from palestra.models.causal_lm import CausalLM
from palestra.models.kernels import TORCH, Attention, Kernels, PackedLayer
from palestra_cpu.attention_kernels import CachedRuns, Runs
from palestra_cpu.cpu_kernels import attention_kernels, compiled_kernels, cpu_kernels
from palestra_cpu.kernel_arguments import CachedRows
from palestra_cpu.llama_layers import shorten_layers
from palestra_cpu.packed import pack_base, pack_model
from palestra_cpu.torch_operators import RunAttention, runs_of_trees

TORCH_VERSION = "2.13.0"  # whose private functions and layouts of oneDNN these kernels use


def load() -> Kernels:
    """Return the kernels, or why they cannot be used with the installed torch."""
    found = torch.__version__.partition("+")[0]
    if found != TORCH_VERSION:
        return Kernels(f"palestra_cpu needs torch {TORCH_VERSION}, and {found} is installed")
    return CpuExtension()


class CpuExtension(Kernels):
    """Layers, packed matrices and attention in bfloat16 on a CPU."""

    def numerics(self) -> tuple[str, str]:
        """Compile the functions on first use; see `Kernels`."""
        tried = compiled_kernels()
        return TORCH if tried.kernels is None else f"compiled by {tried.compiler}", tried.problem

    def shorten_layers(self, model: nn.Module) -> None:
        """See `Kernels`."""
        shorten_layers(model)

    def pack(self, model: CausalLM, exact: bool) -> None:
        """See `Kernels`."""
        pack_model(model, exact)

    def pack_base(self, model: CausalLM) -> dict[str, PackedLayer]:
        """See `Kernels`."""
        return dict(pack_base(model))

    def decoding(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Attention:
        """See `Kernels`."""
        return DecodingRows(parts)

    def prompts(self, pieces: Sequence[tuple[Tensor, int, int]]) -> Attention:
        """See `Kernels`."""
        return _Prompts(pieces)

    def trees(self, trees: Sequence[Sequence[tuple[int, int, int]]]) -> Attention:
        """See `Kernels`."""
        return _Trees(trees)


class DecodingRows(CachedRows):
    """Attention of one new token for each row of a cache."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor | None:
        """Write keys and values [1, K, N, D] into the cache; return the attention of N queries, [N, H, D]."""
        kernels = cpu_kernels() if query.dtype == torch.bfloat16 and query.device.type == "cpu" else None
        if kernels is None:
            return None
        pieces, start = list[Tensor](), 0
        for storage, lengths in self.parts:
            rows = len(lengths)
            keys, values = storage[layer, 0, :rows], storage[layer, 1, :rows]
            new = query[:, :, start : start + rows], key[:, :, start : start + rows], value[:, :, start : start + rows]
            pieces.append(kernels.attend(new, keys, values, lengths, scale, window))
            start += rows
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class _Prompts:
    """Attention of chunks of prompts, each after its cached tokens."""

    def __init__(self, pieces: Sequence[tuple[Tensor, int, int]]) -> None:
        self._pieces = pieces

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor | None:
        """Write keys and values [1, K, N, D] into the caches; return the attention of N queries, [N, H, D]."""
        kernels = attention_kernels(query, key)
        return None if kernels is None else kernels.prompts(layer, (query, key, value), self._runs, scale, window)

    @functools.cached_property
    def _runs(self) -> CachedRuns:
        return CachedRuns(self._pieces)


class _Trees:
    """Attention within trees, each run once."""

    def __init__(self, trees: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        self._trees = trees

    def __call__(
        self, _layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor | None:
        """Return the attention output of N nodes, [N, H, D]."""
        if (kernels := attention_kernels(query, key)) is None:
            return None
        how = (scale, window)
        seen: Tensor = RunAttention.apply(query, key, value, self._runs, kernels, how)  # type: ignore[no-untyped-call]
        return seen

    @functools.cached_property
    def _runs(self) -> Runs:
        return runs_of_trees(self._trees)
