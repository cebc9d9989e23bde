"""Whether the models of a job fit into the memory of this machine and of its graphics cards, before they are loaded.

What is counted is the least that a job takes: weights, gradients and moments. Activations, keys and values come on top,
of which `palestra check` finds out by a trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from palestra.config import EmbeddedEngineConfig, FakeEngineConfig, JobConfig
from palestra.errors import ConfigError, Conflict, ModelError
from palestra.runtime.cards import trainer_cards, visible_cards
from palestra.runtime.memory import available_bytes
from palestra.runtime.model_facts import ModelFacts, model_facts
from palestra.runtime.model_sizes import HERE, RANKS, Sizes, add_policy, add_reference, copies_of
from palestra.runtime.places import JobPlaces

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The bytes that the models of a job take.

    Attributes:
        machine: of the machine's memory.
        cards: of the memory of graphics cards, without servers of other projects, which have shares of their own.
        trainer_cards: of these bytes, what is on the trainer's cards.
    """

    machine: int
    cards: int
    trainer_cards: int


def read_facts(model: str) -> tuple[str, ModelFacts]:
    """Return the folder of a model, or its exact name if it has none, and what its files say.

    Args:
        model: name or folder; of an adapter, its base is meant.

    Raises:
        ModelError: there is no such model.
        OSError, ValueError: its files can't be read.
    """
    from palestra.models.adapter_files import base_of
    from palestra.models.catalog import model_folder

    folder = model_folder(base_of(model))
    facts = model_facts(folder) if isinstance(folder, Path) else ModelFacts(parameters=None, context=None)
    return str(folder), facts


def references_of(config: JobConfig) -> dict[str, str]:
    """Return the models of references that the job names, by their keys."""
    if config.kind != "training":
        return {}
    return {
        f"{config.algorithm_key(name)}.kl.reference": kl.reference
        for name in config.trained_policies
        if (kl := config.algorithm_of(name).kl) is not None and kl.reference is not None
    }


def check_room(config: JobConfig, weights: Mapping[str, str], places: JobPlaces) -> None:
    """Refuse a job whose models can't fit into memory: the kernel would end it after minutes, without a reason.

    Args:
        config: the job.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        places: where its processes run; those with bundles of their own look at their memory themselves.

    Raises:
        ConfigError: the message says how much is missing.
    """
    elsewhere = places.engine is not None or places.trainer is not None
    if elsewhere or isinstance(config.engine, FakeEngineConfig) or config.base is not None:
        return
    sizes = _sizes(config, weights)
    if sizes is not None and (found := shortage(config, sizes)) is not None:
        raise ConfigError(found[1])


def check_more(config: JobConfig, weights: Mapping[str, str], count: int) -> None:
    """Refuse more inference workers for a job that samples, if their models do not fit into the machine's memory.

    Args:
        config: the job, whose engine is embedded. Workers on graphics cards are counted by `worker_cards`.
        weights: see `check_room`.
        count: of the workers that are about to start.

    Raises:
        Conflict: the message says how much is missing.
    """
    sizes = _sizes(config, weights)
    if sizes is None or any(
        isinstance(one, EmbeddedEngineConfig) and _is_on_card(one.device) for one in config.engine.tables
    ):
        return
    if (needed := sizes.worker * count) > (free := available_bytes()):
        raise Conflict(
            f"there is no room for {count} more inference worker{'s' * (count > 1)}, and the job goes on with those "
            f"that it has: they take {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free, so that "
            f"{(needed - free) / GIB:.1f} GiB are missing"
        )


def _sizes(config: JobConfig, weights: Mapping[str, str]) -> Sizes | None:
    """Return the sizes of the models of a job; None: one of them can't be read, which its loading says."""
    sizes = Sizes()
    try:
        for name, policy in config.policies.items():
            folder, facts = read_facts(weights.get(name, policy.model))
            add_policy(sizes, config, name, folder, facts.parameters or 0)
        for model in references_of(config).values():
            folder, facts = read_facts(model)
            add_reference(sizes, config, folder, facts.parameters or 0)
    except (ModelError, OSError, ValueError):
        return None
    return sizes


def shortage(config: JobConfig, sizes: Sizes) -> tuple[str, str] | None:
    """Return the key to change, and a sentence, where the models of a job do not fit; None: they may fit.

    Args:
        config: the job, all of whose processes are on this machine.
        sizes: of its models.
    """
    room, workers = room_of(config, sizes), copies_of(config)
    if room.machine > (free := available_bytes()):
        return _key(config), _missing(room.machine, free, "memory", workers)
    if not room.cards:
        return None
    try:
        bytes_free = [card.free_bytes for card in visible_cards()]
    except ConfigError:  # the engine says that it can't count them
        return None
    known = [each for each in bytes_free if each is not None]
    if len(known) < len(bytes_free):
        return None  # drivers that do not say; the process that loads the models fails
    own = known[: trainer_cards(config, is_here=True)]
    used = known if config.engine.pooled else own or known[:1]
    if room.trainer_cards > sum(own):
        return "model", _missing(room.trainer_cards, sum(own), _cards(len(own)), 1)
    if room.cards > sum(used):
        return _key(config), _missing(room.cards, sum(used), _cards(len(used)), workers)
    return None


def room_of(config: JobConfig, sizes: Sizes) -> Room:
    """Return which memory the models of a job are in.

    Args:
        config: the job.
        sizes: of its models.
    """
    trainer = config.trainer
    trains_on_card = not trainer.cpu_offload and _is_on_card(trainer.device)
    trained = sizes.trained + sizes.shared_by(RANKS)
    machine, cards = sizes.kept, 0
    for (*_, device, part), size in sizes.shared.items():
        machine += size * (part == HERE and not _is_on_card(device))
        cards += size * (part == HERE and _is_on_card(device))
    for table in config.engine.tables:
        copies = table.started_count * sizes.worker
        if isinstance(table, EmbeddedEngineConfig) and _is_on_card(table.device):
            cards += copies
        elif isinstance(table, EmbeddedEngineConfig) or not _is_on_card("auto"):
            machine += copies
    return Room(
        machine=machine + trained * (not trains_on_card),
        cards=cards + trained * trains_on_card,
        trainer_cards=trained * trains_on_card,
    )


def _is_on_card(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()


def _key(config: JobConfig) -> str:
    if copies_of(config) <= 1:
        return "model"
    return "engine.workers" if config.engine.kind == "mixed" else "engine.replicas"


def _cards(number: int) -> str:
    return "the GPU's memory" if number == 1 else f"the memory of {number} GPUs"


def _missing(needed: int, free: int, whose: str, workers: int) -> str:
    """Return the sentence about models that do not fit.

    Args:
        needed: bytes.
        free: bytes.
        whose: the memory, in words.
        workers: inference workers with a copy of the models.
    """
    several = f" with {workers} inference workers, each with a copy," if workers > 1 else ""
    return (
        f"weights, gradients and moments{several} take {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB of {whose} are "
        f"free, so that {(needed - free) / GIB:.1f} GiB are missing; choose a smaller model"
        + (", or fewer workers" if workers > 1 else "")
    )
