"""Looks whether there is enough memory for a trainer over several processes, before they are started."""

from __future__ import annotations

from pathlib import Path

from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.models.adapter_files import adapter_folder, base_of
from palestra.models.catalog import model_folder
from palestra.runtime.memory import available_bytes
from palestra.runtime.model_facts import model_facts
from palestra.runtime.model_sizes import BYTES, TRAINED_BYTES

GIB = 2**30
RANK_BYTES = 400 * 2**20  # of a rank that has met the others, before it loads anything: the libraries, above all torch


def check_memory(config: JobConfig, models: dict[str, str], rank_memory_gib: float | None = None) -> None:
    """Refuse a job whose ranks would not fit into the memory that is free now, or into that of their bundles.

    Args:
        config: the job; its trainer has several devices.
        models: what each policy that is trained is loaded from, by the policy's name.
        rank_memory_gib: memory of each rank, where it has a bundle; None: all ranks share what this machine has free.

    Raises:
        ConfigError: the message says how much is missing.
        ModelError: a model is not there.
    """
    ranks = config.trainer.devices
    needed = ranks * RANK_BYTES + sum(_least_bytes(config, name, model) for name, model in models.items())
    if rank_memory_gib is not None:
        each = needed / ranks / GIB
        if each > rank_memory_gib:
            raise ConfigError(
                f"a rank of the trainer takes {each:.1f} GiB of memory or more, and its bundle has "
                f"{rank_memory_gib:.3g} GiB, so that {each - rank_memory_gib:.1f} GiB are missing: give the trainer's "
                "bundle more memory_gib, or choose a smaller model or an adapter"
            )
        return
    if needed > (free := available_bytes()):
        raise ConfigError(
            f"trainer.devices is {ranks}, and its processes take {needed / GIB:.1f} GiB of memory or more; "
            f"{free / GIB:.1f} GiB are free, so that {(needed - free) / GIB:.1f} GiB are missing: choose a smaller "
            "model, an adapter, or fewer devices"
        )


def _least_bytes(config: JobConfig, policy: str, model: str) -> int:
    """Return the least memory that a policy takes on all ranks together, beside their libraries.

    Ranks share out weights, gradient and moments, and read each its own rows of the weights. Models that see, and
    adapters that are merged into their base, are loaded whole by every rank (`models.parted_loading`).
    """
    folder = model_folder(base_of(model))
    if not isinstance(folder, Path) or _uses_cards(config):
        return 0  # the model is not on this machine yet, or its weights will not be in this memory
    facts = model_facts(folder)
    parameters = facts.parameters or 0
    if config.policies[policy].adapter is not None:
        return parameters * BYTES[config.trainer.dtype]
    is_whole = facts.sees or adapter_folder(model) is not None
    loading = BYTES["float32"] * config.trainer.devices if is_whole else 0
    return parameters * max(loading, TRAINED_BYTES)


def _uses_cards(config: JobConfig) -> bool:
    """Return whether weights, gradients and moments are in the memory of graphics cards, as far as is known here."""
    import torch

    trainer = config.trainer
    return not trainer.cpu_offload and (
        trainer.device == "cuda" or (trainer.device == "auto" and torch.cuda.is_available())
    )
