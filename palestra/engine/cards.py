"""Assigns GPUs to the processes of a job's engine, apart from the trainer's where there are others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.config import JobConfig
from palestra.engine.driver import driver_of
from palestra.errors import ConfigError
from palestra.models.gpus import VISIBLE, GpuMeter, GpuReader, card_names
from palestra.types.gpus import GpuReading


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A GPU that this process may use.

    Attributes:
        memory_bytes: None: unknown to the driver.
        free_bytes: when it was read; None: unknown to the driver.
    """

    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CardShare:
    """The GPUs of one engine process.

    Attributes:
        sharers: largest number of processes on one of these GPUs, including this one and the trainer.
    """

    cards: tuple[Card, ...]
    sharers: int

    @property
    def visible(self) -> str:
        """Return the GPUs in the format of `CUDA_VISIBLE_DEVICES`."""
        return ",".join(card.name for card in self.cards)


def visible_cards(reader: GpuReader | None = None) -> list[Card]:
    """Return the GPUs that this process may use, in CUDA's order. Without `reader` NVML tells their memory."""
    visible = os.environ.get(VISIBLE)
    reading = (reader or GpuReader(visible)).read()
    if visible is not None:
        names = [str(name) for name in card_names(visible)]
    elif reading.cards:
        names = [str(card.index) for card in reading.cards]
    else:
        import torch

        if not torch.cuda.is_available():
            why = reading.problem or "the driver has none"
            raise ConfigError(f"the graphics cards can't be counted ({why}); name those of the job in {VISIBLE}")
        names = [str(number) for number in range(torch.cuda.device_count())]
    uses = reading.cards if len(reading.cards) == len(names) else [None] * len(names)
    return [
        Card(name=name)
        if use is None or use.memory_bytes is None or use.memory_used_bytes is None
        else Card(name=name, memory_bytes=use.memory_bytes, free_bytes=use.memory_bytes - use.memory_used_bytes)
        for name, use in zip(names, uses, strict=True)
    ]


def trainer_cards(config: JobConfig, is_here: bool) -> int:
    """Return how many of this process's GPUs the trainer uses, always the first ones; 0: none. `is_here`: the trainer
    shares this process's GPUs; otherwise trainer or engine have bundles of their own.
    """
    if not is_here or config.kind != "training" or config.trainer.device == "cpu":
        return 0
    import torch

    return config.trainer.devices if torch.cuda.is_available() else 0


def deal_cards(cards: Sequence[Card], processes: int, each: int, trainer: int) -> list[CardShare]:
    """Return the GPUs of each engine process.

    The trainer's GPUs are avoided if there are others. Processes get GPUs of their own while there are enough; then as
    few as possible share one.
    """
    if len(cards) < each:
        raise ConfigError(
            f"each process of the engine needs {each} graphics card(s), and this job may use {len(cards)}: lower "
            f"engine.tensor_parallel, or name more cards in {VISIBLE}"
        )
    others = cards[trainer:]
    # Where one process needs more cards than the trainer leaves, the last ones have the fewest of the trainer's.
    slots = [tuple(others[at : at + each]) for at in range(0, len(others) - each + 1, each)] or [tuple(cards[-each:])]
    dealt = [slots[number % len(slots)] for number in range(processes)]
    uses = Counter(card.name for slot in dealt for card in slot) + Counter(card.name for card in cards[:trainer])
    return [CardShare(cards=slot, sharers=max(uses[card.name] for card in slot)) for slot in dealt]


class CardTurns:
    """GPUs of processes that may end and be replaced: each new process gets the least used ones."""

    def __init__(self, shares: Sequence[CardShare]) -> None:
        """Begin without processes. Each share is for one process; without shares the processes compute on no GPU."""
        self._users = {share.visible: 0 for share in shares}

    def take(self) -> str | None:
        """Return the GPUs of a starting process, in the format of `CUDA_VISIBLE_DEVICES`; None: no GPUs."""
        if not self._users:
            return None
        chosen = min(self._users, key=lambda visible: self._users[visible])
        self._users[chosen] += 1
        return chosen

    def give_back(self, visible: str | None) -> None:
        """Release the GPUs of an ended process, as returned by `take`."""
        if visible is not None:
            self._users[visible] -= 1


def gpus_of_job(config: JobConfig) -> Callable[[], GpuReading]:
    """Return a function that reads this process's GPUs; it returns nothing for a job that uses none of them."""
    return GpuMeter(GpuReader(os.environ.get(VISIBLE)).read).now if _uses_cards(config) else GpuReading


def _uses_cards(config: JobConfig) -> bool:
    """Return whether a part of a job computes on cards of this machine."""
    if not config.loads_models:
        return False
    if any(driver_of(table).uses_cards(table) for table in config.engine.tables):
        return True
    if config.kind != "training" or config.trainer.device == "cpu":
        return False
    import torch  # the trainer has loaded it

    return torch.cuda.is_available()
