"""A model's matrices in the layout that oneDNN multiplies by, for an engine on a CPU.

A product with a plain matrix brings it into this layout first, for every pass. A model that only samples is packed
once for each version of its weights instead, and its plain matrices are dropped, so that it takes no more memory. A
base under adapters is packed once, beside its plain matrices, which a trainer needs. Layers that read the same input,
such as queries, keys and values, are packed as one matrix: their input is rounded once and multiplied once. oneDNN's
results are the same bits as those of the plain matrices; few rows are multiplied by `CpuKernels` where that is faster,
which adds in another order.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.models.adapters import head_layer
from palestra.models.causal_lm import CausalLM
from palestra.models.device import memory_bytes, multiplies_bfloat16
from palestra_cpu.packed_matrix import PackedLinear, PackedMatrix

log = logging.getLogger("palestra.models")
_BASE_SHARE = 8  # a packed copy of a base takes at most this part of the memory
_MOST_DIFFERENCE = 0.05  # relative, between a packed model and itself before: anything more is another function


class PackedLayers:
    """The packed matrices of a model: those of its layers, and a copy of the head's.

    Attributes:
        head: multiplies hidden states. The plain matrix stays beside it, because it is the embedding as well, and the
            logits of the most probable tokens are computed from it in float32.
    """

    def __init__(self, model: Any, groups: Sequence[Sequence[str]], exact: bool = False) -> None:
        """Put packed matrices in the place of a model's linear layers.

        Args:
            model: of transformers, its matrices in bfloat16.
            groups: names of layers that read the same input.
            exact: see `PackedMatrix`.
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
        """Return the output layer's product with hidden states [M, hidden], bfloat16 [M, V]."""
        return self.head.product(hidden, 0)

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


def pack_model(model: CausalLM, exact: bool = False) -> None:
    """Pack a model that only samples, if that is possible; otherwise it stays as it is.

    It is possible for bfloat16 on a CPU for which torch has oneDNN, and for layers of `torch.nn.Linear`. A packed model
    has no gradients.

    Args:
        model: its weights are its own, and no pass of it is running.
        exact: whether products must have the same bits for any number of rows.
    """
    if model.base is None and model.packed is None and _can_be_packed(model):
        _pack(model, exact)


def pack_base(model: CausalLM) -> dict[str, PackedLinear]:
    """Pack a copy of a base's matrices, if that is possible and they take at most an eighth of the memory.

    Args:
        model: on the weights of the base, with layers of its own that have no adapter; no pass of it is running.

    Returns:
        What stands for the base's layers by their names, and for the layer that predicts tokens; {}: nothing does.
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
