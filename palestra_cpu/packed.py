"""A model's matrices in oneDNN's layout, for an engine on a CPU.

A product with a plain matrix converts it to this layout in every pass. A model that only samples is packed once for
each version of its weights, and its plain matrices are dropped, so that it needs no more memory. A base under adapters
is packed once, and keeps its plain matrices for the trainer. Layers with the same input, such as queries, keys and
values, are packed as one matrix: their input is rounded and multiplied once. oneDNN's results have the same bits as
with plain matrices; few rows are multiplied by `CpuKernels` if that is faster, which adds in another order.
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
    """The packed matrices of a model's layers, and a copy of the head's.

    Attributes:
        head: multiplies hidden states. The plain matrix is kept, because it is the embedding too, and gives the float32
            logits of the most probable tokens.
    """

    def __init__(self, model: Any, groups: Sequence[Sequence[str]], exact: bool = False) -> None:
        """Replace a transformers model's bfloat16 linear layers by packed matrices.

        Args:
            groups: names of layers with the same input.
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
        """Pack new weights; the head and all biases are read from the layers.

        Args:
            given: at least those named by `shapes`, [out, in] each.
        """
        for matrix in self._matrices:
            matrix.pack([given[f"{name}.weight"] for name in matrix.names])
        self.head.pack([self._head.weight])


def pack_model(model: CausalLM, exact: bool = False) -> None:
    """Pack a model that only samples, if possible.

    It is possible for bfloat16 on a CPU with torch's oneDNN, for `torch.nn.Linear` layers. A packed model has no
    gradients.

    Args:
        model: has its own weights, and no running pass.
        exact: whether products must give the same bits for any number of rows.
    """
    if model.base is None and model.packed is None and _can_be_packed(model):
        _pack(model, exact)


def pack_base(model: CausalLM) -> dict[str, PackedLinear]:
    """Pack a copy of a base's matrices, if possible in at most an eighth of the memory; return the packed layers by
    name.

    Args:
        model: shares the base's weights, with layers of its own without an adapter, and no running pass.
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
    """Return groups of linear layers with the same input, among those that a pass calls once.

    Layers called only for some tokens, such as experts, are left out if the trial does not call them.
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
