"""Checks of jobs with a sharded trainer: names what it does not support."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palestra.config.job import JobConfig


def check_devices(config: JobConfig) -> None:
    """Raise ValueError for a training job that a sharded trainer can't train, naming the key."""
    trainer = config.trainer
    if trainer.cpu_offload and (trainer.devices == 1 or trainer.device == "cpu"):
        raise ValueError("trainer.cpu_offload is for several CUDA devices; leave it out, or set trainer.devices")
    if trainer.devices == 1:
        return
    if not config.engine.has_model:
        raise ValueError(
            f"trainer.devices is {trainer.devices}, and engine.kind = {config.engine.kind!r} trains no model; leave "
            "trainer.devices out"
        )
    for name in config.trained_policies:
        algorithm = config.algorithm_of(name)
        if hasattr(algorithm, "critic"):
            raise ValueError(
                f"trainer.devices is {trainer.devices}, and {config.algorithm_key(name)}.name = {algorithm.name!r} has "
                "a critic, which is trained on one device; take an algorithm without one, or leave trainer.devices out"
            )
