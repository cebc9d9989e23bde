"""A model's matrices in the layout that oneDNN multiplies by, for an engine on a CPU.

A product with a plain matrix brings it into this layout first, for every pass. A model that only samples is packed
once for each version of its weights instead, and its plain matrices are dropped, so that it takes no more memory.
Layers that read the same input, such as queries, keys and values, are packed as one matrix: their input is rounded once
and multiplied once. The results are the same bits as those of the plain matrices.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.models.causal_lm import CausalLM

log = logging.getLogger("palestra.models")
_ROWS = 64  # for which oneDNN chooses the layout; other numbers of rows are multiplied by it as well
_MOST_DIFFERENCE = 0.05  # relative, between a packed model and itself before: anything more is another function


class PackedMatrix:
    """The matrices of layers that read the same input, below one another, with their biases.

    Attributes:
        names: of the layers in the model of transformers.
        width: how many inputs they have.
    """

    def __init__(self, names: Sequence[str], layers: Sequence[nn.Linear]) -> None:
        """Pack the weights of some layers, all with a bias or all without, as they are.

        Args:
            names: of the layers.
            layers: have weights [out, in], with the same number of inputs.
        """
        self.names = list(names)
        self._sizes, self.width = [layer.out_features for layer in layers], layers[0].in_features
        self._biases: list[Tensor | None] = [layer.bias for layer in layers]
        self._given: Tensor | None = None
        self._products: tuple[Tensor, ...] = ()
        self.pack([layer.weight for layer in layers])

    def __deepcopy__(self, known: dict[int, Any]) -> PackedMatrix:
        """Return a copy with weights of its own, which `copy.deepcopy` can't make of what oneDNN keeps."""
        made = known[id(self)] = object.__new__(PackedMatrix)
        made.names, made._sizes, made.width = self.names, self._sizes, self.width
        made._biases = copy.deepcopy(self._biases, known)
        made._given, made._products = None, ()
        made._packed, made._bias = self._packed.clone(), self._bias
        return made

    def pack(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights, one [out, in] for each layer; the biases are read from the layers."""
        whole = torch.cat([weight.detach().to(torch.bfloat16) for weight in weights])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS)
        biases = [bias.detach() for bias in self._biases if bias is not None]
        self._bias = torch.cat(biases).to(torch.bfloat16) if biases else None

    def shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """Yield the name and the shape of each layer's weights."""
        for name, size in zip(self.names, self._sizes, strict=True):
            yield f"{name}.weight", torch.Size((size, self.width))

    def unpacked(self) -> tuple[Tensor, ...]:
        """Return the weights of each layer, bfloat16 [out, in], in memory of their own."""
        return torch.split(self._packed.to_dense(), self._sizes)

    def whole_product(self, rows: Tensor) -> Tensor:
        """Return what all layers make of rows [N, in], bfloat16 [N, out]."""
        rounded = rows.to(torch.bfloat16)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rounded, self._packed, self._bias, "none", [], "")
        return out

    def product(self, x: Tensor, number: int) -> Tensor:
        """Return what one of the layers makes of its input, bfloat16 [..., out].

        The products of all layers are computed for the first that reads an input, and kept for the others.

        Args:
            x: [..., in], in any floating type.
            number: of the layer.
        """
        if x is not self._given:
            whole = self.whole_product(x.flatten(0, -2))
            self._given, self._products = x, torch.split(whole, self._sizes, dim=-1)
        found = self._products[number]
        if number == len(self._sizes) - 1:
            self._given, self._products = None, ()
        return found.view(*x.shape[:-1], -1)


class _PackedLinear(nn.Module):
    """Stands where a linear layer was, and has a part of a packed matrix."""

    def __init__(self, matrix: PackedMatrix, number: int, layer: nn.Linear) -> None:
        super().__init__()
        self.matrix, self._number = matrix, number
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, bfloat16 [..., out], for [..., in]."""
        return self.matrix.product(x, self._number)


class PackedLayers:
    """The packed matrices of a model: those of its layers, and a copy of the head's.

    Attributes:
        head: multiplies hidden states. The plain matrix stays beside it, because it is the embedding as well, and the
            logits of the most probable tokens are computed from it in float32.
    """

    def __init__(self, model: Any, groups: Sequence[Sequence[str]]) -> None:
        """Put packed matrices in the place of a model's linear layers.

        Args:
            model: of transformers, its matrices in bfloat16.
            groups: names of layers that read the same input.
        """
        head = model.get_output_embeddings()
        self.head = PackedMatrix(["head"], [head])
        self._head = head
        self._matrices = []
        for names in groups:
            layers = [model.get_submodule(name) for name in names]
            matrix = PackedMatrix(names, layers)
            self._matrices.append(matrix)
            for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
                model.set_submodule(name, _PackedLinear(matrix, number, layer))

    def __iter__(self) -> Iterator[PackedMatrix]:
        return iter((*self._matrices, self.head))

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the weights that are packed and nowhere else, by the names of their parameters."""
        return {name: shape for matrix in self._matrices for name, shape in matrix.shapes()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight that is packed and nowhere else, bfloat16 [out, in], by the name of its parameter."""
        for matrix in self._matrices:
            for name, weight in zip(matrix.names, matrix.unpacked(), strict=True):
                yield f"{name}.weight", weight

    def take(self, given: Mapping[str, Tensor]) -> None:
        """Pack new weights; those of the head, and all biases, are taken from the layers, which have them already.

        Args:
            given: at least what `shapes` names, [out, in] each.
        """
        for matrix in self._matrices:
            matrix.pack([given[f"{name}.weight"] for name in matrix.names])
        self.head.pack([self._head.weight])


def pack(model: CausalLM) -> None:
    """Pack a model that only samples, if that is possible; otherwise it stays as it is.

    It is possible for bfloat16 on a CPU for which torch has oneDNN, and for layers of `torch.nn.Linear`. A packed model
    has no gradients.

    Args:
        model: its weights are its own, and no pass of it is running.
    """
    plain = model.compute_dtype == torch.bfloat16 and model.device.type == "cpu" and model.base is None
    if not plain or model.packed is not None or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    if type(model.model.get_output_embeddings()) is not nn.Linear:
        return
    groups = _same_inputs(model)
    before = model.trial_logits()
    layers = {name: model.model.get_submodule(name) for names in groups for name in names}
    model.packed = PackedLayers(model.model, groups)
    after = model.trial_logits()
    if not float((after - before).norm()) < _MOST_DIFFERENCE * float(before.norm()):
        for name, layer in layers.items():
            model.model.set_submodule(name, layer)
        model.packed = None
        log.warning(
            "%s models are sampled from plain matrices: packed ones give other numbers", model.config.model_type
        )


def _same_inputs(model: CausalLM) -> list[list[str]]:
    """Return the names of the linear layers that a pass calls once, those that read the same input together.

    Layers that are called for some tokens only, such as experts, are left out where the trial does not call them.
    """
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
