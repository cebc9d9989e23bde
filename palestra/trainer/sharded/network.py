"""A model whose weights are shared out over ranks, which gather those of a layer while they compute it.

Gathering is collective, so all ranks make the same number of passes; one that has nothing left to compute makes an idle
one. Gradients are summed over ranks and not averaged, because the loss weights of rows are shares of the whole batch.
Products are rounded by autocast as in one process: FSDP's own mixed precision would round the residual stream as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from palestra.models.causal_lm import CausalLM
from palestra.tokens import TokenRun
from palestra.trainer.packing import Tree
from palestra.trainer.token_forward import flat_inputs


class ShardedNetwork:
    """A model of which each rank has a part.

    Attributes:
        model: computes only inside of `compute`; its parameters are DTensors.
    """

    def __init__(self, model: CausalLM, mesh: DeviceMesh, offload: bool) -> None:
        """Share out the weights of a model that this rank has loaded whole.

        Args:
            model: the same on every rank; if it has an adapter, no other model may need the weights of its base.
            mesh: the ranks, in one dimension.
            offload: whether what a rank has of weights, gradients and moments waits in the memory of its CPU.
        """
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        self.model, self._root = model, _Root(model.model)
        fully_shard(self._root, mesh=mesh, offload_policy=policy, reshard_after_forward=True)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # without it, gloo can't be given the factor
                module.set_gradient_divide_factor(1.0)
        if model.base is not None:  # the whole weights, which the parts have taken the place of
            for parameter in model.base.model.parameters():
                parameter.data = parameter.data.new_empty(0)
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

    def compute(self, work: Callable[[], Any]) -> Any:
        """Return what one pass of the model returns: tensors, whose gradient may be computed. Collective.

        Args:
            work: calls the model once, and anything of it that is not a layer.
        """
        return self._root(work)

    def idle(self) -> Tensor:
        """Return 0, a scalar, from a pass over one token, with zero gradients for all weights; called in `compute`."""
        model = self.model
        hidden = model.hidden(*flat_inputs((self._tree,), model.device))
        return self.touched(model.logits(hidden).sum() * 0.0)

    def touched(self, loss: Tensor) -> Tensor:
        """Return a loss that gives every weight a gradient, of zero if it has none.

        Ranks add up the gradients of the same weights only. A rank may have rows that need fewer weights than those of
        another: no head where no token is trained, no part for pictures where there are none.

        Args:
            loss: scalar; to be called in `compute`.
        """
        for module, name in self._others:
            loss = loss + getattr(module, name).view(-1)[0] * 0.0
        return loss


class _Root(nn.Module):
    """Is called for a whole pass, so that embedding and head, which may be the same weights, are gathered once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()
