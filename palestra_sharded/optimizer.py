"""AdamW over sharded weights: the same arithmetic on each part, and one norm over all parts.

A part stays on its own device. With CPU offload that is the CPU although ranks compute on CUDA devices, so
`DTensor.from_local` and `distribute_tensor`, which move tensors to the ranks' device, cannot be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from palestra.errors import CheckpointError
from palestra.trainer.moment_files import write_moments
from palestra.trainer.optimizer import Named, Optimizer, moments_folder
from palestra_sharded.group import rows_of_rank


def shared_tensor(own: Tensor, mesh: DeviceMesh, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """Return a DTensor made of this rank's rows, on their device, without sending or copying. `own` is [m, d] or [m];
    `shape` is that of the whole tensor, [n, d] or [n].
    """
    make: Any = DTensor
    found: DTensor = make(
        own, DTensorSpec(mesh, (Shard(0),), TensorMeta(shape, stride, own.dtype)), requires_grad=False
    )
    return found


def part_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Shard a tensor like a parameter; every rank has all of it, so no data is sent. `whole` is [n, d] or [d]; one that
    is sharded already is returned unchanged.
    """
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
    """Copy this rank's part of a checkpoint's weights, which every rank has read. Weights are whole, [n, d] or [d], by
    name.
    """
    for name, parameter in parameters:
        if name not in weights or weights[name].shape != parameter.shape:
            raise CheckpointError(f"{path} has no weight {name} of shape {tuple(parameter.shape)}: another model")
    with torch.no_grad():
        for name, parameter in parameters:
            parameter.copy_(part_like(weights[name].to(parameter.dtype), parameter))
