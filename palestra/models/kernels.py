"""What a package of kernels may compute in place of torch's operators, on a CPU.

A package is found by an entry point of the group `palestra.kernels`: a function without arguments that returns a
`Kernels`. Without one, and wherever the kernels can't be used, torch's operators compute the same.
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
    """Layers that read the same input, multiplied together.

    Attributes:
        names: of the layers in the model of transformers.
        width: how many inputs they have.
    """

    names: list[str]
    width: int

    def whole_product(self, rows: Tensor) -> Tensor:
        """Return what all layers make of rows [N, in], [N, out]."""
        ...


class PackedWeights(Protocol):
    """The matrices of a model in a layout of the kernels, in place of the plain ones."""

    def __iter__(self) -> Iterator[PackedProduct]: ...

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the output layer's product with hidden states [M, hidden], [M, V]."""
        ...

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the weights that are packed and nowhere else, by the names of their parameters."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight that is packed and nowhere else, [out, in], by the name of its parameter."""
        ...

    def take(self, given: Mapping[str, Tensor]) -> None:
        """Pack new weights: at least those that `shapes` names, [out, in] each."""
        ...


class PackedLayer(Protocol):
    """A part of a packed matrix that computes what a linear layer does."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out], for [..., in]."""
        ...

    def whole_product(self, layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        """Return what all layers of the matrix make of x [N, in], [N, out].

        Args:
            layers: these layers; this is the first of them.
        """
        ...


class Kernels:
    """What kernels may take over. This class leaves everything to torch; a package overrides what it computes."""

    def __init__(self, problem: str = "") -> None:
        """Say in one line why kernels that are installed are not used."""
        self._problem = problem

    def numerics(self) -> tuple[str, str]:
        """Return what computes models in bfloat16 on a CPU, and why it is no kernel, which may be empty."""
        return TORCH, self._problem

    def shorten_layers(self, model: nn.Module) -> None:
        """Let layers of a transformers model on a CPU compute in fewer steps, where there are kernels for them."""

    def pack(self, model: CausalLM, exact: bool) -> None:
        """Set `model.packed` if the model, which only samples from now on, can be packed.

        Args:
            exact: whether products must have the same bits for any number of rows.
        """

    def pack_base(self, model: CausalLM) -> dict[str, PackedLayer]:
        """Return packed copies of a base's linear layers by their names, also of its output layer; {}: none."""
        return {}

    def decoding(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Attention:
        """Return the attention of one new token of each row of a cache; see `DecodeAttention`."""
        return _by_torch

    def prompts(self, pieces: Sequence[tuple[Tensor, int, int]]) -> Attention:
        """Return the attention of pieces of prompts; see `PrefillAttention`."""
        return _by_torch

    def trees(self, trees: Sequence[Sequence[tuple[int, int, int]]]) -> Attention:
        """Return the attention, with a gradient, within trees that lie one after another.

        Args:
            trees: the runs of each, see `palestra.trainer.packing.Tree`.
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
