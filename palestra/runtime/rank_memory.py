"""Looks whether there is enough memory for a trainer over several processes, before they are started."""

from __future__ import annotations

from pathlib import Path

from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.models.adapter_files import base_of
from palestra.models.catalog import model_folder
from palestra.runtime.checking import available_bytes, model_facts
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
    needed = ranks * RANK_BYTES
    for name, model in models.items():
        folder = model_folder(base_of(model))
        parameters = (model_facts(folder).parameters if isinstance(folder, Path) else None) or 0
        # Every rank loads all of the model, and keeps its part, beside which gradient and moments come later.
        if config.policies[name].adapter is None:
            needed += parameters * max(ranks * BYTES["float32"], TRAINED_BYTES)
        else:
            needed += parameters * ranks * BYTES[config.trainer.dtype]
    if rank_memory_gib is not None:
        each = needed / ranks / GIB
        if each > rank_memory_gib:
            raise ConfigError(
                f"a rank of the trainer takes {each:.1f} GiB of memory while it loads, and its bundle has "
                f"{rank_memory_gib:.3g} GiB, so that {each - rank_memory_gib:.1f} GiB are missing: give the trainer's "
                "bundle more memory_gib, or choose a smaller model or an adapter"
            )
        return
    if needed > (free := available_bytes()):
        raise ConfigError(
            f"trainer.devices is {ranks}, and its processes take {needed / GIB:.1f} GiB of memory while they load; "
            f"{free / GIB:.1f} GiB are free, so that {(needed - free) / GIB:.1f} GiB are missing: choose a smaller "
            "model, an adapter, or fewer devices"
        )
