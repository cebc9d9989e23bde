"""Matrices of layers with the same input in oneDNN's layout, and modules that replace the layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra_cpu.cpu_kernels import cpu_kernels
from palestra_cpu.kernel_arguments import MatrixAddress

_ROWS = 64  # for which oneDNN chooses the layout; other numbers of rows are multiplied by it as well


class PackedMatrix:
    """The stacked matrices of layers with the same input, with their biases.

    Attributes:
        names: of the layers in the transformers model.
        width: number of inputs.
        address: of the weights, for products of few rows; None: oneDNN computes all.
    """

    def __init__(self, names: Sequence[str], layers: Sequence[nn.Linear], exact: bool = False) -> None:
        """Pack the weights of some layers, all with a bias or all without.

        Args:
            layers: with weights [out, in] and the same number of inputs.
            exact: whether a product must give the same bits for any number of rows, so that oneDNN computes all.
        """
        self.names = list(names)
        self._sizes, self.width = [layer.out_features for layer in layers], layers[0].in_features
        self._biases: list[Tensor | None] = [layer.bias for layer in layers]
        self._exact = exact
        self.address: MatrixAddress | None = None
        self._given: Tensor | None = None
        self._products: tuple[Tensor, ...] = ()
        self.pack([layer.weight for layer in layers])

    def __deepcopy__(self, known: dict[int, Any]) -> PackedMatrix:
        """Return a copy with its own weights; `copy.deepcopy` can't copy oneDNN's data."""
        made = known[id(self)] = object.__new__(PackedMatrix)
        made.names, made._sizes, made.width, made._exact = self.names, self._sizes, self.width, self._exact
        made._biases = copy.deepcopy(self._biases, known)
        made._given, made._products = None, ()
        made._packed, made._bias = self._packed.clone(), self._bias
        made.address = None
        if self.address is not None:
            made.address = made._found(made._packed, torch.cat(made.unpacked()), made._bias, trusted=True)
        return made

    def pack(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights, one [out, in] for each layer; biases are read from the layers."""
        rounded = [weight.detach().to("cpu", torch.bfloat16) for weight in weights]  # a trainer's are on its card
        whole = torch.cat(rounded) if len(rounded) > 1 else rounded[0]  # of one, `cat` would only make a copy
        packed = torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS)
        biases = [bias.detach() for bias in self._biases if bias is not None]
        bias = torch.cat(biases).to(torch.bfloat16) if biases else None
        address = self._found(packed, whole, bias, trusted=self.address is not None)
        self._packed, self._bias, self.address = packed, bias, address

    def _found(self, packed: Tensor, plain: Tensor, bias: Tensor | None, trusted: bool) -> MatrixAddress | None:
        """Return the address of weights [out, in], if this machine multiplies few rows itself; see
        `MatrixAddress.of`.
        """
        kernels = None if self._exact else cpu_kernels()
        if kernels is None or not kernels.most_rows:
            return None
        return MatrixAddress.of(packed, plain, bias, trusted)

    def shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """Yield the name and the shape of each layer's weights."""
        for name, size in zip(self.names, self._sizes, strict=True):
            yield f"{name}.weight", torch.Size((size, self.width))

    def unpacked(self) -> tuple[Tensor, ...]:
        """Return the weights of each layer, bfloat16 [out, in], in new memory."""
        return torch.split(self._packed.to_dense(), self._sizes)

    def whole_product(self, rows: Tensor) -> Tensor:
        """Return the outputs of all layers for rows [N, in], bfloat16 [N, out]."""
        rounded, kernels, address = rows.to(torch.bfloat16), cpu_kernels(), self.address
        if address is not None and kernels is not None and len(rows) <= kernels.most_rows:
            return kernels.product(rounded, address)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rounded, self._packed, self._bias, "none", [], "")
        return out

    def product(self, x: Tensor, number: int) -> Tensor:
        """Return one layer's output, bfloat16 [..., out].

        The first layer that reads an input computes the outputs of all, which are kept for the others.

        Args:
            x: [..., in], of any floating type.
        """
        if x is not self._given:
            whole = self.whole_product(x.flatten(0, -2))
            self._given, self._products = x, torch.split(whole, self._sizes, dim=-1)
        found = self._products[number]
        if number == len(self._sizes) - 1:
            self._given, self._products = None, ()
        return found.view(*x.shape[:-1], -1)


class PackedLinear(nn.Module):
    """Replaces a linear layer by a part of a packed matrix."""

    def __init__(self, matrix: PackedMatrix, number: int, layer: nn.Linear) -> None:
        super().__init__()
        self.matrix, self._number = matrix, number
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, bfloat16 [..., out], for [..., in]."""
        return self.matrix.product(x, self._number)

    def whole_product(self, layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        """Return the outputs of all layers of the matrix for x [N, in]: bfloat16 [N, out].

        Args:
            layers: the first one is this layer.
        """
        return self.matrix.whole_product(x)


def packed_part(layer: nn.Module) -> PackedLinear | None:
    """Return a layer's part of a packed matrix; None: it has a plain matrix."""
    found: PackedLinear | None = layer if type(layer) is PackedLinear else getattr(layer, "packed", None)
    return found
