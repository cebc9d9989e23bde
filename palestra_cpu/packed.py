"""A model's matrices in oneDNN's layout, for an engine on a CPU.

A product with a plain matrix converts it to this layout in every pass. A model that only samples is packed once for
each version of its weights, and its plain matrices are dropped, so that it needs no more memory. A base under adapters
is packed once, and keeps its plain matrices for the trainer. Layers with the same input, such as queries, keys and
values, are packed as one matrix: their input is rounded and multiplied once. oneDNN's results have the same bits as
with plain matrices; few rows are multiplied by `CpuKernels` if that is faster, which adds in another order.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.models.adapters import head_layer
from palestra.models.causal_lm import CausalLM
from palestra.models.device import memory_bytes, multiplies_bfloat16
from palestra_cpu.cpu_kernels import cpu_kernels
from palestra_cpu.kernel_arguments import MatrixAddress

_ROWS = 64  # for which oneDNN chooses the layout; other numbers of rows are multiplied by it as well


class PackedMatrix:
    """The stacked matrices of layers with the same input, with their biases.

    Attributes:
        names: of the layers in the transformers model.
        address: of the weights, for products of few rows; None: oneDNN computes all.
    """

    def __init__(self, names: Sequence[str], layers: Sequence[nn.Linear], exact: bool = False) -> None:
        """Pack the weights of some layers, all with a bias or all without. Layers have weights [out, in] and the same
        number of inputs. `exact`: a product gives the same bits for any number of rows, so that oneDNN computes all.
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
        """Return a copy with its own weights; `copy.deepcopy` cannot copy oneDNN's data."""
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
        """Return the address of weights [out, in], if this machine multiplies few rows itself."""
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

        The first layer that reads an input computes the outputs of all, which are kept for the others. `x` is [...,
        in], of any floating type.
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
        """Return the outputs of all layers of the matrix for x [N, in]: bfloat16 [N, out]."""
        return self.matrix.whole_product(x)


def packed_part(layer: nn.Module) -> PackedLinear | None:
    """Return a layer's part of a packed matrix; None: it has a plain matrix."""
    found: PackedLinear | None = layer if type(layer) is PackedLinear else getattr(layer, "packed", None)
    return found


log = logging.getLogger("palestra.models")
_BASE_SHARE = 8  # a packed copy of a base takes at most this part of the memory
_MOST_DIFFERENCE = 0.05  # relative, between a packed model and itself before: anything more is another function


class PackedLayers:
    """The packed matrices of a model's layers, and a copy of the head's.

    Attributes:
        head: multiplies hidden states. The plain matrix is kept, because it is the embedding too, and gives the float32
            logits of the most probable tokens.
    """

    def __init__(self, model: Any, groups: Sequence[Sequence[str]], exact: bool = False) -> None:
        """Replace a transformers model's bfloat16 linear layers by packed matrices. `groups` are names of layers with
        the same input.
        """
        head = model.get_output_embeddings()
        self.head = PackedMatrix(["head"], [head], exact)
        self._head = head
        self._matrices = []
        for names in groups:
            layers = [model.get_submodule(name) for name in names]
            matrix = PackedMatrix(names, layers, exact)
            self._matrices.append(matrix)
            for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
                model.set_submodule(name, PackedLinear(matrix, number, layer))

    def __iter__(self) -> Iterator[PackedMatrix]:
        return iter((*self._matrices, self.head))

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the logits, bfloat16 [M, V], of hidden states [M, hidden]."""
        return self.head.product(hidden, 0)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the weights that exist only in packed form, by parameter name."""
        return {name: shape for matrix in self._matrices for name, shape in matrix.shapes()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight that exists only in packed form, bfloat16 [out, in], by parameter name."""
        for matrix in self._matrices:
            for name, weight in zip(matrix.names, matrix.unpacked(), strict=True):
                yield f"{name}.weight", weight

    def take(self, given: Mapping[str, Tensor]) -> None:
        """Pack new weights; the head and all biases are read from the layers. `given` has at least those named by
        `shapes`, [out, in] each.
        """
        for matrix in self._matrices:
            matrix.pack([given[f"{name}.weight"] for name in matrix.names])
        self.head.pack([self._head.weight])


def pack_model(model: CausalLM, exact: bool = False) -> None:
    """Pack a model that only samples, if possible.

    It is possible for bfloat16 on a CPU with torch's oneDNN, for `torch.nn.Linear` layers. A packed model has no
    gradients. `model` has its own weights, and no running pass; `exact`: products give the same bits for any number of
    rows.
    """
    if model.base is None and model.packed is None and _can_be_packed(model):
        _pack(model, exact)


def pack_base(model: CausalLM) -> dict[str, PackedLinear]:
    """Pack a copy of a base's matrices, if possible in at most an eighth of the memory; return the packed layers by
    name. `model` shares the base's weights, with layers of its own without an adapter, and no running pass.
    """
    head = head_layer(model.model)
    size = sum(2 * weight.numel() for _, weight in model.named_parameters() if weight.ndim == 2)
    if size * _BASE_SHARE <= memory_bytes() and _can_be_packed(model):
        _pack(model)
    if not isinstance(model.packed, PackedLayers):
        return {}
    found = {name: module for name, module in model.model.named_modules() if isinstance(module, PackedLinear)}
    found |= {name: PackedLinear(model.packed.head, 0, layer) for name, layer in head.items()}
    model.packed = None  # the head is called like any other layer: an adapter may be for it
    return found


def _can_be_packed(model: CausalLM) -> bool:
    plain = model.compute_dtype == torch.bfloat16 and model.device.type == "cpu"
    return plain and multiplies_bfloat16() and type(model.model.get_output_embeddings()) is nn.Linear


def _pack(model: CausalLM, exact: bool = False) -> None:
    """Pack a model, unless it then computes something else."""
    groups = _same_inputs(model)
    before = model.trial_logits()
    layers = {name: model.model.get_submodule(name) for names in groups for name in names}
    model.packed = PackedLayers(model.model, groups, exact)
    after = model.trial_logits()
    if not float((after - before).norm()) < _MOST_DIFFERENCE * float(before.norm()):
        for name, layer in layers.items():
            model.model.set_submodule(name, layer)
        model.packed = None
        log.warning(
            "%s models are sampled from plain matrices: packed ones give other numbers", model.config.model_type
        )


def _same_inputs(model: CausalLM) -> list[list[str]]:
    """Return groups of linear layers with equal input that every pass calls once, so without experts."""
    head = model.model.get_output_embeddings()
    uses = Counter(id(weight) for _, weight in model.model.named_parameters(remove_duplicate=False))
    linear = {
        name: module
        for name, module in model.model.named_modules()
        if type(module) is nn.Linear and module is not head and uses[id(module.weight)] == 1
    }
    calls: list[tuple[str, Tensor]] = []  # the inputs are kept, so that no other has the same identity
    hooks = [
        module.register_forward_pre_hook(lambda _module, inputs, name=name: calls.append((name, inputs[0])))
        for name, module in linear.items()
    ]
    try:
        model.trial_logits()
    finally:
        for hook in hooks:
            hook.remove()
    called = [name for name, _ in calls]
    groups: list[list[str]] = []
    last: Tensor | None = None
    for name, given in calls:
        if called.count(name) > 1:
            continue
        same_kind = groups and (linear[groups[-1][-1]].bias is None) == (linear[name].bias is None)
        if given is last and same_kind:
            groups[-1].append(name)
        else:
            groups.append([name])
        last = given
    return groups
