"""What the models of a job are by their files, and the least memory they take, so that a job that can't fit is refused.

Weights, gradients and optimizer moments are counted. Activations, keys and values come on top: `palestra check` runs
two steps and prints what they took.
"""

from __future__ import annotations

import gc
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.config import JobConfig
from palestra.engine.cards import visible_cards
from palestra.engine.driver import driver_of
from palestra.errors import ConfigError, Conflict, ModelError, OutOfMemory
from palestra.models.device import BYTES, TRAINED_BYTES, available_bytes, memory_bytes
from palestra.runtime.early_checks import past_copies
from palestra.runtime.terms import JobPlaces

_OF_TOWERS = (
    ".visual.",
    ".vision_tower.",
    ".vision_model.",
    ".multi_modal_projector.",
    ".connector.",
)  # in names of weights, behind a dot


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts from a model's files.

    Attributes:
        parameters: number of weights; None: the folder has no safetensors.
        context: in tokens; None: unknown.
        sees: whether it is a vision-language model.
        tower: number of the vision tower's weights.
    """

    parameters: int | None
    context: int | None
    sees: bool = False
    tower: int = 0


def model_facts(folder: Path) -> ModelFacts:
    """Return the facts about a model in Hugging Face's layout."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        context = (found.get("text_config") or found).get("max_position_embeddings")
        sizes: dict[str, int] = {}
        files = sorted(folder.glob("model*.safetensors"))  # others, which some models bring as well, are not loaded
        for file in files:
            sizes |= _sizes(file)
        return ModelFacts(
            parameters=sum(sizes.values()) if files else None,
            context=None if context is None else int(context),
            sees="vision_config" in found,
            tower=sum(size for name, size in sizes.items() if any(part in f".{name}" for part in _OF_TOWERS)),
        )
    except (OSError, ValueError, TypeError, AttributeError, KeyError, struct.error) as error:
        raise ModelError(f"the model in {folder} can't be read: {type(error).__name__}: {error}") from error


def _sizes(file: Path) -> dict[str, int]:
    """Return how many numbers each tensor of a safetensors file has, from its header."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        if size > file.stat().st_size:
            raise ValueError(f"{file.name} is no safetensors file")  # a pointer of Git LFS, say
        header = json.loads(opened.read(size))
    return {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}


GIB = 2**30
SAVED_BYTES = 12  # a parameter in a checkpoint: weight and two moments in float32
VERSION_BYTES = 4  # a parameter in a past version on the disk
RANK_BYTES = 400 * 2**20  # a rank before it loads anything: its libraries, above all torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMemory:
    """Bytes of a job's models.

    Attributes:
        trainer: weights, gradients and moments, and frozen models.
        shared: the part of `worker` that an engine in the trainer's process shares with the trainer.
        kept: the copy of the trained weights for workers that are started later.
        saved: one checkpoint of each policy.
        versions: past versions of pools, on disk.
    """

    trainer: int = 0
    worker: int = 0
    shared: int = 0
    kept: int = 0
    saved: int = 0
    versions: int = 0


def read_facts(model: str, ask: bool = True) -> tuple[str, ModelFacts]:
    """Return a model's folder, or its exact name without one, and its facts. `model`: name or folder; an adapter means
    its base. `ask`: whether to ask the hub for the model; False: use only its cache.
    """
    from palestra.models.adapter_files import base_of
    from palestra.models.catalog import model_folder

    try:
        folder = model_folder(base_of(model), ask)
    except (OSError, ValueError) as error:
        raise ModelError(f"the model {model} can't be read: {type(error).__name__}: {error}") from error
    if not isinstance(folder, Path):
        return folder, ModelFacts(parameters=None, context=None)
    return str(folder.resolve()), model_facts(folder)


def references_of(config: JobConfig) -> dict[str, str]:
    """Return the models of references that the job names, by their keys."""
    if config.kind != "training":
        return {}
    return {
        f"{config.algorithm_key(name)}.kl.reference": kl.reference
        for name in config.trained_policies
        if (kl := config.algorithm_of(name).kl) is not None and kl.reference is not None
    }


def memory_of(
    config: JobConfig, models: Mapping[str, tuple[str, ModelFacts]], references: Mapping[str, ModelFacts]
) -> ModelMemory:
    """Return the memory of a job's models."""
    each = BYTES[getattr(config.engine, "dtype", "bfloat16")]
    sampled: dict[str, int] = {}  # parameters of models that never change, which are in memory once, by folder
    read = {folder: facts.parameters or 0 for folder, facts in references.items()}
    trainer = copies = copied_once = saved = versions = 0
    trained = config.trained_policies if config.kind == "training" else ()
    for name, (folder, facts) in models.items():
        parameters, policy = facts.parameters or 0, config.policies[name]
        if name not in trained:
            sampled[folder] = parameters
            if any(config.teacher_of(other) == name for other in trained):
                read[folder] = parameters
            continue
        algorithm = config.algorithm_of(name)
        if policy.adapter is not None or (algorithm.kl is not None and algorithm.kl.reference is None):
            read[folder] = parameters
        if policy.adapter is not None:
            sampled[folder] = parameters
            continue
        fixed = 0 if policy.vision == "trained" else facts.tower
        networks, more = algorithm.trained_networks, 4 * algorithm.copied_networks
        trainer += (parameters - fixed) * (TRAINED_BYTES * networks + more) + fixed * BYTES["float32"]
        saved += (parameters - fixed) * (SAVED_BYTES * networks + more) + fixed * BYTES["float32"]
        past = past_copies(config, name)
        copies += parameters * each * (1 + past)
        copied_once += parameters * each
        versions += parameters * VERSION_BYTES * (past + 1) if past else 0
    is_one = config.trainer.devices == 1 and _is_in_process(config) and each == BYTES[config.trainer.dtype]
    return ModelMemory(
        trainer=trainer + sum(read.values()) * BYTES[config.trainer.dtype],
        worker=copies + sum(sampled.values()) * each,
        shared=sum(sampled[folder] for folder in sampled.keys() & read.keys()) * each * is_one,
        kept=copied_once * config.engine.pooled,
        saved=saved,
        versions=versions,
    )


def _is_in_process(config: JobConfig) -> bool:
    """Return whether the engine is in the trainer's process and on its device."""
    devices, on_card = _engine_devices(config), is_on_card(config.trainer.device)
    return config.engine.started_count == 1 and [is_on_card(device) for device in devices] == [on_card]


def _engine_devices(config: JobConfig) -> list[str]:
    """Return the devices of the engine's workers in this job, kind by kind."""
    found = [driver_of(table).computes(table) for table in config.engine.tables]
    return [computes.device for computes in found if computes is not None]


def is_on_card(device: str) -> bool:
    """Return whether a configured device (`auto`, `cpu`, `cuda`) is a GPU of this machine."""
    import torch

    return device != "cpu" and torch.cuda.is_available()


def check_memory(config: JobConfig, weights: Mapping[str, str], places: JobPlaces) -> None:
    """Raise an error if a job's models can't fit into memory: the kernel would kill it after minutes, without a reason.

    Args:
        weights: folders that replace the policies' `model`, by policy.

    Raises:
        OutOfMemory: other processes use the memory now.
    """
    if not config.loads_models:
        return
    if (needed := _known_memory(config, weights)) is None:
        return
    if places.rank_memory_gib is not None:
        _check_rank(config, needed, places.rank_memory_gib)
    if places.engine is None and places.trainer is None and memory_shortage(config, needed) is not None:
        _free_unused()  # what an earlier job of this process has left
        if (found := memory_shortage(config, needed)) is not None:
            raise found


def check_more(config: JobConfig, weights: Mapping[str, str], count: int) -> None:
    """Raise Conflict if more inference workers do not fit into the machine's memory.

    The message says how much is missing. The job's engine is embedded; workers on GPUs are counted by `worker_cards`.
    """
    if any(map(is_on_card, _engine_devices(config))):
        return
    if (needed := _known_memory(config, weights)) is None:
        return
    if (size := needed.worker * count) > (free := available_bytes(swap=True)):
        raise Conflict(
            f"{count} more inference worker{'s' * (count > 1)} would take {amount(size)} of memory, and {amount(free)} "
            f"are free: {amount(size - free)} are missing; the job goes on with the workers that it has"
        )


def memory_shortage(config: JobConfig, needed: ModelMemory) -> ConfigError | OutOfMemory | None:
    """Return the error of a job whose models do not fit into the free memory; None: they may fit."""
    placed = _placed(config, needed)
    machine, cards = placed[False], placed[True]
    if machine > (free := available_bytes(swap=True)):
        return _shortage(config, machine, free, "memory", memory_bytes())
    if not cards:
        return None
    try:
        found = visible_cards()
    except ConfigError:  # the engine says that it can't count them
        return None
    if any(card.free_bytes is None for card in found):
        return None  # the driver does not say
    own = found[: config.trainer.devices]
    parts = ((needed.trainer if _trains_on_card(config) else 0, own), (cards, found if config.engine.pooled else own))
    for size, used in parts:
        free, whole = sum(card.free_bytes or 0 for card in used), sum(card.memory_bytes or 0 for card in used)
        if size > free:
            name = "the GPU's memory" if len(used) == 1 else f"the memory of {len(used)} GPUs"
            return _shortage(config, size, free, name, whole)
    return None


def machine_bytes(config: JobConfig, needed: ModelMemory) -> int:
    """Return the main memory that a job's models take."""
    return _placed(config, needed)[False]


def _placed(config: JobConfig, needed: ModelMemory) -> dict[bool, int]:
    """Return the bytes that a job's models take on GPUs (True), without other projects' servers, and elsewhere."""
    found = {False: needed.kept + _ranks_bytes(config), True: 0}
    found[_trains_on_card(config)] += needed.trainer - needed.shared
    for table in config.engine.tables:
        computes = driver_of(table).computes(table)
        on_card = is_on_card("auto" if computes is None else computes.device)
        if computes is not None or not on_card:
            found[on_card] += table.started_count * needed.worker
    return found


def _trains_on_card(config: JobConfig) -> bool:
    return config.kind == "training" and not config.trainer.cpu_offload and is_on_card(config.trainer.device)


def _ranks_bytes(config: JobConfig) -> int:
    ranks = config.trainer.devices if config.kind == "training" else 1
    return RANK_BYTES * ranks if ranks > 1 else 0


def _check_rank(config: JobConfig, needed: ModelMemory, rank_memory_gib: float) -> None:
    on_card = _trains_on_card(config)
    each = (RANK_BYTES + (0 if on_card else needed.trainer) / config.trainer.devices) / GIB
    if each > rank_memory_gib:
        raise ConfigError(
            f"a rank of the trainer takes {each:.1f} GiB of memory or more, and its bundle has {rank_memory_gib:.3g} "
            f"GiB: {each - rank_memory_gib:.1f} GiB are missing; give the trainer's bundle more memory_gib, or choose "
            "a smaller model or an adapter"
        )


def _known_memory(config: JobConfig, weights: Mapping[str, str]) -> ModelMemory | None:
    """Return the memory of a job's models; None: a model cannot be read, which its loading reports."""
    try:  # without the hub: who loads a model asks, once
        models = {name: read_facts(weights.get(name, each.model), ask=False) for name, each in config.policies.items()}
        references = dict(read_facts(model, ask=False) for model in references_of(config).values())
    except ModelError:
        return None
    return memory_of(config, models, references)


def _free_unused() -> None:
    """Free unused memory of this process."""
    import torch

    from palestra.models.device import return_freed_memory

    gc.collect()
    return_freed_memory()
    torch.cuda.empty_cache()  # nothing where no card is used


def amount(size: int) -> str:
    """Format bytes for people."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def _shortage(config: JobConfig, needed: int, free: int, whose: str, whole: int) -> ConfigError | OutOfMemory:
    """Return the error for models that take `needed` bytes of a memory with `free` of `whole` bytes."""
    trains, workers = config.kind == "training", config.engine.started_count
    remedies = ["choose a smaller model"]
    whole_weights = [name for name in config.trained_policies if config.policies[name].adapter is None]
    if trains and any(config.algorithm_of(name).trains_policy for name in whole_weights):
        remedies.append("train an adapter")
    remedies += ["use fewer inference workers"] if workers > 1 else []
    remedies += ["set trainer.devices lower"] if trains and config.trainer.devices > 1 else []
    several = f" with {workers} inference workers" if workers > 1 else ""
    text = (
        f"weights{', gradients and moments' if trains else ''}{several} take {amount(needed)}, and {amount(free)} of "
        f"{whose} are free: {amount(needed - free)} are missing; {', or '.join(remedies)}"
    )
    return OutOfMemory(text) if needed <= whole else ConfigError(text)
