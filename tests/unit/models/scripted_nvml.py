"""NVML as a script: cards that say what a test wants, and fail as the driver's library does.

A folder with this file as `pynvml.py` stands for the real one in other processes, with `PALESTRA_TEST_CARDS` cards.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

NVML_ERROR_UNINITIALIZED, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 1, 3, 4
NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_GPU_IS_LOST = 9, 15
NVML_TEMPERATURE_GPU = 0
GIB = 2**30


class NVMLError(Exception):
    """An answer of the driver that is no figure."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Card:
    """A card; `errors` are raised in place of its figures, by the function's name."""

    def __init__(self, number: int, **errors: int) -> None:
        self.number, self.errors = number, errors


class Nvml:
    """The functions that are used of the library."""

    NVMLError = NVMLError
    NVML_ERROR_UNINITIALIZED = NVML_ERROR_UNINITIALIZED
    NVML_ERROR_NOT_SUPPORTED = NVML_ERROR_NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION = NVML_ERROR_NO_PERMISSION
    NVML_TEMPERATURE_GPU = NVML_TEMPERATURE_GPU

    def __init__(self, *cards: Card) -> None:
        self.cards, self.begun, self.refusal = list(cards), 0, 0

    def nvmlInit(self) -> None:
        if self.refusal:
            raise NVMLError(self.refusal)
        self.begun += 1

    def forget(self) -> None:
        """Do as a driver that is loaded again: whoever had begun has to begin again."""
        self.begun = 0

    def _check(self) -> None:
        if not self.begun:
            raise NVMLError(NVML_ERROR_UNINITIALIZED)

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self._check()
        return self._ask(self.cards[index], "handle")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        self._check()
        return next(card for card in self.cards if uuid == f"GPU-{card.number}")

    def nvmlDeviceGetName(self, card: Card) -> str:
        return f"Scripted {self._ask(card, 'name').number}"

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:
        return SimpleNamespace(gpu=10 * self._ask(card, "use").number + 25, memory=3)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        return SimpleNamespace(used=(self._ask(card, "memory").number + 1) * GIB, total=80 * GIB, free=0)

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:
        return 300_500 + self._ask(card, "power").number

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:
        assert sensor == NVML_TEMPERATURE_GPU
        return 50 + self._ask(card, "temperature").number

    def _ask(self, card: Card, what: str) -> Card:
        if what in card.errors:
            raise NVMLError(card.errors[what])
        return card


_LIBRARY = Nvml(*map(Card, range(int(os.environ.get("PALESTRA_TEST_CARDS", "0")))))


def __getattr__(name: str) -> Any:
    """Return a function of the library, where this file is imported as `pynvml`."""
    return getattr(_LIBRARY, name)
