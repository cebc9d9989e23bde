"""Whether the models of a job fit into the memory of this machine and of its graphics cards, before they are loaded.

What is counted is the least that a job takes: weights, gradients and moments. Activations, keys and values come on top,
of which `palestra check` finds out by a trial.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from palestra.config import EmbeddedEngineConfig, FakeEngineConfig, JobConfig
from palestra.errors import ConfigError, Conflict, ModelError
from palestra.models.device import memory_bytes
from palestra.runtime.cards import trainer_cards, visible_cards
from palestra.runtime.memory import available_bytes
from palestra.runtime.model_facts import ModelFacts, model_facts
from palestra.runtime.model_sizes import HERE, RANKS, Sizes, add_policy, add_reference, copies_of, is_on_card
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Models that do not fit into the memory that is free.

    Attributes:
        key: of the configuration, to change.
        text: one sentence for people.
        may_pass: whether there is as much memory as they need, which others use now.
    """

    key: str
    text: str
    may_pass: bool


def read_facts(model: str, ask: bool = True) -> tuple[str, ModelFacts]:
    """Return the folder of a model, or its exact name if it has none, and what its files say.

    Args:
        model: name or folder; of an adapter, its base is meant.
        ask: whether the hub may be asked for a model; False: only its cache is looked at.

    Raises:
        ModelError: there is no such model, or its files can't be read.
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


def check_room(config: JobConfig, weights: Mapping[str, str], places: JobPlaces) -> None:
    """Refuse a job whose models can't fit into memory: the kernel would end it after minutes, without a reason.

    Args:
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        places: where its processes run; those with bundles of their own look at their memory themselves.

    Raises:
        ConfigError: the message says how much is missing.
    """
    elsewhere = places.engine is not None or places.trainer is not None
    if elsewhere or isinstance(config.engine, FakeEngineConfig) or config.base is not None:
        return
    sizes = _sizes(config, weights)
    if sizes is None or shortage(config, sizes) is None:
        return
    _free_unused()  # what an earlier job of this process has left
    if (found := shortage(config, sizes)) is not None:
        raise ConfigError(found.text) from (MemoryError("others use it now") if found.may_pass else None)


def check_more(config: JobConfig, weights: Mapping[str, str], count: int) -> None:
    """Refuse more inference workers for a job that samples, if their models do not fit into the machine's memory.

    Args:
        config: the job, whose engine is embedded. Workers on graphics cards are counted by `worker_cards`.
        weights: see `check_room`.
        count: of the workers that are about to start.

    Raises:
        Conflict: the message says how much is missing.
    """
    if any(isinstance(one, EmbeddedEngineConfig) and is_on_card(one.device) for one in config.engine.tables):
        return
    if (sizes := _sizes(config, weights)) is None:
        return
    if (needed := sizes.worker * count) > (free := available_bytes(swap=True)):
        raise Conflict(
            f"there is no room for {count} more inference worker{'s' * (count > 1)}, and the job goes on with those "
            f"that it has: they take {amount(needed)} of memory, and {amount(free)} are free, so that "
            f"{amount(needed - free)} are missing"
        )


def _sizes(config: JobConfig, weights: Mapping[str, str]) -> Sizes | None:
    """Return the sizes of the models of a job; None: one of them can't be read, which its loading says."""
    sizes = Sizes()
    try:
        for name, policy in config.policies.items():
            folder, facts = read_facts(weights.get(name, policy.model), ask=False)  # who loads it asks, once
            add_policy(sizes, config, name, folder, facts.parameters or 0, facts.tower)
        for model in references_of(config).values():
            folder, facts = read_facts(model, ask=False)
            add_reference(sizes, config, folder, facts.parameters or 0)
    except ModelError:
        return None
    return sizes


def _free_unused() -> None:
    """Give back memory of this process that nothing uses any more."""
    import torch

    from palestra.models.device import return_freed_memory

    gc.collect()
    return_freed_memory()
    torch.cuda.empty_cache()  # nothing where no card is used


def shortage(config: JobConfig, sizes: Sizes) -> Shortage | None:
    """Return what is missing where the models of a job do not fit into the memory that is free; None: they may fit.

    Args:
        config: the job, all of whose processes are on this machine.
    """
    room = room_of(config, sizes)
    if room.machine > (free := available_bytes(swap=True)):
        return _shortage(config, _key(config), room.machine, free, "memory", memory_bytes())
    if not room.cards:
        return None
    try:
        cards = visible_cards()
    except ConfigError:  # the engine says that it can't count them
        return None
    own = cards[: trainer_cards(config, is_here=True)]
    used = cards if config.engine.pooled else own or cards[:1]
    for key, needed, on in (("model", room.trainer_cards, own), (_key(config), room.cards, used)):
        free, whole = sum(card.free_bytes or 0 for card in on), sum(card.memory_bytes or 0 for card in on)
        if needed > free and all(card.free_bytes is not None for card in cards):  # a driver says how much is free
            return _shortage(config, key, needed, free, _cards(len(on)), whole)
    return None


def room_of(config: JobConfig, sizes: Sizes) -> Room:
    """Return which memory the models of a job are in."""
    trainer = config.trainer
    trains_on_card = not trainer.cpu_offload and is_on_card(trainer.device)
    trained = sizes.trained + sizes.shared_by(RANKS)
    machine, cards = sizes.kept, 0
    for (*_, device, part), size in sizes.shared.items():
        machine += size * (part == HERE and not is_on_card(device))
        cards += size * (part == HERE and is_on_card(device))
    for table in config.engine.tables:
        copies = table.started_count * sizes.worker
        if isinstance(table, EmbeddedEngineConfig) and is_on_card(table.device):
            cards += copies
        elif isinstance(table, EmbeddedEngineConfig) or not is_on_card("auto"):
            machine += copies
    return Room(
        machine=machine + trained * (not trains_on_card),
        cards=cards + trained * trains_on_card,
        trainer_cards=trained * trains_on_card,
    )


def _key(config: JobConfig) -> str:
    if copies_of(config) <= 1:
        return "model"
    return "engine.workers" if config.engine.kind == "mixed" else "engine.replicas"


def _cards(number: int) -> str:
    return "the GPU's memory" if number == 1 else f"the memory of {number} GPUs"


def amount(size: int) -> str:
    """Return bytes as people read them."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def _shortage(config: JobConfig, key: str, needed: int, free: int, whose: str, whole: int) -> Shortage:
    """Return what is missing."""
    trains, workers = config.kind == "training", copies_of(config)
    several = f" with {workers} inference workers, each with a copy," if workers > 1 else ""
    remedies = ["choose a smaller model"]
    if trains and any(config.policies[name].adapter is None for name in config.trained_policies):
        remedies.append("train an adapter")
    remedies += ["use fewer workers"] if workers > 1 else []
    text = (
        f"weights{', gradients and moments' if trains else ''}{several} take {amount(needed)}, and {amount(free)} of "
        f"{whose} are free, so that {amount(needed - free)} are missing; {', or '.join(remedies)}"
    )
    return Shortage(key=key, text=text, may_pass=needed <= whole)
