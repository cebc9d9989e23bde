"""A model whose weights are sharded over ranks; each layer's weights are gathered while it is computed.

Gathering is collective, so all ranks make the same number of passes; a rank without work makes an idle pass. Gradients
are summed over ranks, not averaged, because the loss weights of rows are shares of the whole batch. Autocast rounds
products as in one process; FSDP's own mixed precision would round the residual stream too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from palestra.errors import CheckpointError
from palestra.models.causal_lm import CausalLM
from palestra.tokens import TokenRun
from palestra.trainer.moment_files import write_moments
from palestra.trainer.optimizer import Named, Optimizer, moments_folder
from palestra.trainer.packing import Tree
from palestra.trainer.token_forward import flat_inputs
from palestra_sharded.group import Exchange, ExchangedGather, ExchangedReduction, rows_of_rank


class ShardedNetwork:
    """One rank's part of a model.

    Attributes:
        model: computes only inside `compute`; its parameters are DTensors.
    """

    def __init__(
        self, model: CausalLM, mesh: DeviceMesh, offload: bool, dtype: torch.dtype, exchange: Exchange | None
    ) -> None:
        """Shard a model whose weights are whole in memory, or still in their files; then call `read` next.

        The model is the same on every rank; with an adapter, no other model may need the weights of its base. `offload`
        keeps weights, gradients and moments in CPU memory. Without `exchange` the mesh's process group gathers and adds
        up.
        """
        model.share_out()
        # Pinned memory is what a CUDA device copies from; without one, there is none.
        kept = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        share = partial(fully_shard, mesh=mesh, offload_policy=kept)
        rounded = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            products = _products(block) if _is_rounded(model, dtype) else []
            for module in products:
                for inner in _others_with_weights(module):
                    share(inner)
            if products:  # what is left of the layer, its norms, is gathered with the embeddings, and stays as it is
                share(products, mp_policy=rounded)
            else:
                share(block)
        self.model, self._root = model, _Root(model.model)
        share(self._root)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # without it, gloo can't be given the factor
                module.set_gradient_divide_factor(1.0)
                if exchange is not None:
                    module.set_custom_all_gather(ExchangedGather(exchange))
                    module.set_custom_reduce_scatter(ExchangedReduction(exchange))
        if model.base is not None:  # the whole weights, which the parts have taken the place of
            for parameter in model.base.model.parameters():
                parameter.data = parameter.data.new_empty(0)
        self._mesh, self._stored = mesh, torch.device("cpu" if offload else mesh.device_type)
        always = [model.model.get_input_embeddings(), *model.blocks]
        used = {id(parameter) for module in always for parameter in module.parameters()}
        self._others = [
            (module, name)
            for module in model.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and id(parameter) not in used
        ]
        self._tree = Tree()
        self._tree.add(TokenRun.of(np.zeros(1, np.int32), ()), np.empty(0, np.int64))

    def read(self) -> None:
        """Read this rank's rows of the weights that are still in files."""
        if self.model.unread is None:
            return
        missing = {name: weight for name, weight in self.model.named_parameters() if weight.is_meta}
        wanted = {name: rows_of_rank(len(p), self._mesh.get_rank(), self._mesh.size()) for name, p in missing.items()}
        made = {id(missing[name]): self._made(missing[name], rows) for name, rows in self.model.unread.rows(wanted)}
        for module in self.model.model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if id(weight) in made:  # FSDP finds it there before its first pass
                    setattr(module, name, made[id(weight)])

    def _made(self, weight: nn.Parameter, rows: Tensor) -> nn.Parameter:
        """Create a weight, [n, d] or [d], from this rank's rows, in the weight's precision."""
        own = rows.to(self._stored, weight.dtype, copy=True)
        found = shared_tensor(own, self._mesh, weight.shape, weight.stride())
        return nn.Parameter(found, requires_grad=weight.requires_grad)

    def compute(self, work: Callable[[], Any]) -> Any:
        """Return the tensors of one forward pass. Collective. `work` calls the model once, and may use parts of it."""
        # A backward pass begins with what is gathered for all of a pass, and frees it; without one the pass has to.
        root: Any = self._root  # `fully_shard` has made it an `FSDPModule`
        root.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
        return root(work)

    def idle(self) -> Tensor:
        """Run a pass over one token and return a scalar 0 with zero gradients for all weights. Call it in `compute`."""
        model = self.model
        hidden = model.hidden(*flat_inputs((self._tree,), model.device))
        return self.touched(model.logits(hidden).sum() * 0.0)

    def touched(self, loss: Tensor) -> Tensor:
        """Return a loss that gives every weight a gradient, zero where it has none. Call it in `compute`.

        Ranks must sum gradients of the same weights, but one rank's rows may not need all of them: no head without
        trained tokens, no vision tower without images.
        """
        for module, name in self._others:
            loss = loss + getattr(module, name).view(-1)[0] * 0.0
        return loss


class _Root(nn.Module):
    """Wraps a whole pass, so that embedding and head, which may be the same weights, are gathered once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def _is_rounded(model: CausalLM, dtype: torch.dtype) -> bool:
    """Return whether autocast rounds the matrices of a model's layers: an adapter's base has them so."""
    return dtype != torch.float32 and model.base is None


def _products(block: nn.Module) -> list[nn.Module]:
    """Return the parts of a decoder layer that have linear layers: its attention and its feed-forward network."""
    return [part for part in block.children() if any(type(module) is nn.Linear for module in part.modules())]


def _others_with_weights(part: nn.Module) -> list[nn.Module]:
    """Return the modules of a part of a layer that have weights and are no linear layers, such as norms of queries."""
    return [
        module
        for module in part.modules()
        if type(module) is not nn.Linear and any(True for _ in module.parameters(recurse=False))
    ]


def shared_tensor(own: Tensor, mesh: DeviceMesh, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """Return a DTensor of shape [n, d] or [n] made of this rank's rows, [m, d] or [m], without a copy."""
    make: Any = DTensor
    found: DTensor = make(
        own, DTensorSpec(mesh, (Shard(0),), TensorMeta(shape, stride, own.dtype)), requires_grad=False
    )
    return found


def part_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Shard a tensor [n, d] or [d], which every rank has, like a parameter; a sharded one is returned as it is."""
    if isinstance(whole, DTensor) or not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    rows = rows_of_rank(len(whole), mesh.get_rank(), mesh.size())
    own = whole[rows].to(parameter.device, copy=True)  # a view would keep the whole tensor in memory
    return shared_tensor(own, mesh, whole.shape, whole.stride())


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, [n, d] or [d]."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor, [n, d] or [d], on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedOptimizer(Optimizer):
    """AdamW over the parts of this rank. All ranks call its methods together."""

    def clip(self, max_norm: float) -> float:
        """Clip by the norm over all ranks; see `Optimizer.clip`.

        torch's `clip_grad_norm_` does it through DTensor, with a message for each weight.
        """
        parts = [self.part_of(p.grad) for _, p in self.parameters if p.grad is not None]
        device = self.parameters[0][1].device
        norms = torch._foreach_norm(parts) if parts else ()
        total = (
            torch.stack([norm.to(device) for norm in norms]).square().sum() if norms else torch.zeros((), device=device)
        )
        dist.all_reduce(total)
        norm = total.sqrt()
        if parts:
            torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a DTensor, [n, d] or [d]; see `Optimizer.part_of`."""
        return local_part(tensor)

    def write(self, folder: Path, prefix: str) -> None:
        """Write the moments of this rank; see `Optimizer.write`."""
        named = {
            f"{key}.{name}": value for name, p in self.parameters for key, value in self.adamw.state.get(p, {}).items()
        }
        write_moments(moments_folder(folder, prefix), named)

    def _restore(self, moments: Mapping[str, dict[str, Tensor]]) -> None:
        """Take over this rank's part of moments, [n, d] or [d]; see `Optimizer._restore`."""
        parameters = dict(self.parameters)
        super()._restore(
            {
                name: {
                    key: value if key == "step" else part_like(value, parameters[name]) for key, value in own.items()
                }
                for name, own in moments.items()
                if name in parameters
            }
        )


def take_weights(parameters: Named, weights: Mapping[str, Tensor], path: Any) -> None:
    """Copy this rank's part of whole weights, [n, d] or [d], by name, which every rank has read."""
    for name, parameter in parameters:
        if name not in weights or weights[name].shape != parameter.shape:
            raise CheckpointError(f"{path} has no weight {name} of shape {tuple(parameter.shape)}: another model")
    with torch.no_grad():
        for name, parameter in parameters:
            parameter.copy_(part_like(weights[name].to(parameter.dtype), parameter))
