"""Interface of packages with CPU kernels that replace torch's operators.

A package is found by an entry point of the group `palestra.kernels`: a function without arguments that returns a
`Kernels`. Without one, and wherever kernels cannot be used, torch's operators compute the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension

if TYPE_CHECKING:
    from palestra.models.causal_lm import CausalLM

GROUP = "palestra.kernels"
TORCH = "torch's operators"

# Called and returns as an `AttentionBackend`, [N, H, D]; None: torch has to compute this call.
Attention = Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor | None]


class PackedProduct(Protocol):
    """Layers with the same input, multiplied together.

    Attributes:
        names: of the layers in the transformers model.
        width: number of inputs.
    """

    names: list[str]
    width: int

    def whole_product(self, rows: Tensor) -> Tensor:
        """Return the outputs of all layers for rows [N, in], [N, out]."""
        ...


class PackedWeights(Protocol):
    """A model's matrices in the layout of the kernels, replacing the plain ones."""

    def __iter__(self) -> Iterator[PackedProduct]: ...

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the logits [M, V] of hidden states [M, hidden]."""
        ...

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the weights that exist only in packed form, by parameter name."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that exist only in packed form, [out, in], by parameter name."""
        ...

    def take(self, given: Mapping[str, Tensor]) -> None:
        """Pack new weights, [out, in] each: at least those named by `shapes`."""
        ...


class PackedLayer(Protocol):
    """A part of a packed matrix that replaces a linear layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out], for [..., in]."""
        ...

    def whole_product(self, layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        """Return the outputs of all layers of the matrix for x [N, in], [N, out]. The first of `layers` is this one."""
        ...


class Kernels:
    """Operations that kernels may replace. This class leaves all of them to torch; a package overrides some."""

    def __init__(self, problem: str = "") -> None:
        """Create kernels; `problem` says in one line why installed kernels are not used."""
        self._problem = problem

    def numerics(self) -> tuple[str, str]:
        """Return what computes bfloat16 models on a CPU, and why it is not a kernel (may be empty)."""
        return TORCH, self._problem

    def shorten_layers(self, model: nn.Module) -> None:
        """Replace layers of a transformers model on a CPU by faster ones, where kernels exist."""

    def pack(self, model: CausalLM, exact: bool) -> None:
        """Set `model.packed` if a model that only samples can be packed. `exact`: products give the same bits for any
        number of rows.
        """

    def pack_base(self, model: CausalLM) -> dict[str, PackedLayer]:
        """Return packed copies of a base's linear layers and output layer by name; {}: none."""
        return {}

    def decoding(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Attention:
        """Return the attention of one new token for each row of a cache; see `DecodeAttention`."""
        return _by_torch

    def prompts(self, pieces: Sequence[tuple[Tensor, int, int]]) -> Attention:
        """Return the attention of chunks of prompts; see `PrefillAttention`."""
        return _by_torch

    def trees(self, trees: Sequence[Sequence[tuple[int, int, int]]]) -> Attention:
        """Return the attention, with a gradient, within concatenated trees. `trees` has the runs of each; see
        `palestra.trainer.packing.Tree`.
        """
        return _by_torch


@functools.cache
def kernels() -> Kernels:
    """Return the kernels of the installed package, the first by name if there are several."""
    for point in extensions(GROUP).values():
        try:
            found: Kernels = load_extension(point)()
        except (ConfigError, ImportError) as error:  # a package that is half removed, or made for other libraries
            return Kernels(f"{point.value} can't be loaded: {error}")
        return found
    return Kernels()


def _by_torch(
    _layer: int, _query: Tensor, _key: Tensor, _value: Tensor, _scale: float, _window: int | None
) -> Tensor | None:
    return None
