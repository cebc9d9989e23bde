"""Parts stay on the device on which they are kept, and are the rows that FSDP's own way of sharing out gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

from palestra_sharded.network import local_part, part_like, shared_tensor


@pytest.fixture(params=[(0, 3), (1, 3), (2, 3)], ids=lambda place: f"rank {place[0]}")
def rank(request):
    """A process group without others, as one of three ranks has it; what it sends goes nowhere."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=request.param[0], world_size=request.param[1])
    yield request.param[0]
    dist.destroy_process_group()


def mesh(device: str) -> DeviceMesh:
    return DeviceMesh(device, [0, 1, 2], _init_backend=False)


def test_a_part_that_is_offloaded_stays_on_the_cpu_though_the_ranks_compute_on_cuda(rank):
    """`DTensor.from_local` would move it to the card, and FSDP then refuses to compute."""
    own = torch.ones(2, 4)
    found = shared_tensor(own, mesh("cuda"), torch.Size((6, 4)), (4, 1))
    assert (found.device.type, found.shape, found.placements) == ("cpu", (6, 4), (Shard(0),))
    assert local_part(found).data_ptr() == own.data_ptr()
    restored = part_like(torch.arange(24.0).view(6, 4), found)
    assert (restored.device.type, restored.device_mesh.device_type) == ("cpu", "cuda")


@pytest.mark.parametrize("shape", [(7, 4), (6,), (4, 2), (2, 3)], ids=str)
def test_parts_are_those_of_distribute_tensor(rank, shape):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    theirs = distribute_tensor(whole, mesh("cpu"), (Shard(0),), src_data_rank=None)
    found = part_like(whole, theirs)
    assert (found.shape, found.placements, found.stride()) == (theirs.shape, theirs.placements, theirs.stride())
    assert torch.equal(local_part(found), local_part(theirs))
    # A view would keep all of the whole tensor in memory, on every rank.
    assert local_part(found).untyped_storage().nbytes() == local_part(found).nbytes


def test_what_is_shared_out_already_or_is_not_to_be_stays_as_it_is(rank):
    whole = torch.ones(6, 2)
    shared = distribute_tensor(whole, mesh("cpu"), (Shard(0),), src_data_rank=None)
    assert part_like(shared, shared) is shared
    assert part_like(whole, whole) is whole
