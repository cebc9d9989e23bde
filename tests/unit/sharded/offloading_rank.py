"""The program of a rank that computes on a CPU and offloads to its memory, which a job is refused.

FSDP's copies between the two are then no copies; all else of the way is that of a CUDA device: which parameters FSDP
finds on the CPU, gradients that it puts there, and the norm, the moments and the checkpoints of these.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from palestra.config import TrainerConfig
from palestra_sharded import network, rank
from palestra_sharded.processes import _main

_share = network.fully_shard


def let_pass(config: TrainerConfig, device: object) -> None:
    """Take the place of `check_offload`."""
    assert config.cpu_offload


def share(*modules: Any, offload_policy: object, **more: Any) -> Any:
    """Share out a module, and fail where it would not be offloaded."""
    assert isinstance(offload_policy, CPUOffloadPolicy)
    assert not offload_policy.pin_memory
    return _share(*modules, offload_policy=offload_policy, **more)


if __name__ == "__main__":
    rank.check_offload = let_pass
    network.fully_shard = share
    _main()
