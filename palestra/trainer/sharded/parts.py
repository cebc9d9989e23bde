"""Tensors sharded by rows, as FSDP does.

A part stays on its own device. With CPU offload that is the CPU although ranks compute on CUDA devices, so
`DTensor.from_local` and `distribute_tensor`, which move tensors to the ranks' device, can't be used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from palestra.trainer.sharded.mapped import rows_of_rank


def shared_tensor(own: Tensor, mesh: DeviceMesh, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """Return a DTensor made of this rank's rows, on their device, without sending or copying.

    Args:
        own: the rows of this rank, [m, d] or [m].
        shape: of the whole tensor, [n, d] or [n].
    """
    make: Any = DTensor
    found: DTensor = make(
        own, DTensorSpec(mesh, (Shard(0),), TensorMeta(shape, stride, own.dtype)), requires_grad=False
    )
    return found


def part_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Shard a tensor like a parameter; every rank has all of it, so no data is sent.

    Args:
        whole: [n, d] or [d]; returned unchanged if it is sharded already.
        parameter: of the same shape.
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
