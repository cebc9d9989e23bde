"""Reduce the metrics of micro-batches to one number each, by the rule that the loss declares for each of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.algorithms.loss import Max, Mean, Reduction


@dataclass(frozen=True, kw_only=True, slots=True)
class SentSums:
    """The sums of a process for another one: scalar arrays by the names of metrics; see `MetricSums`."""

    sums: dict[str, NDArray[Any]]
    counts: dict[str, NDArray[Any]]
    largest: dict[str, NDArray[Any]]
    means: frozenset[str]


class MetricSums:
    """Adds up the metrics of micro-batches, in their order, on the device that computes them."""

    def __init__(self, declared: Collection[str]) -> None:
        self._declared = frozenset(declared)
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}  # divisors of means over some of the trained tokens
        self._largest: dict[str, Tensor] = {}
        self._means: set[str] = set()  # metrics that are means over all trained tokens

    def add(self, reported: Mapping[str, Reduction]) -> None:
        """Add the metrics of one micro-batch. Values are [T] or scalar tensors."""
        if unknown := reported.keys() - self._declared:
            raise ValueError(f"the loss reports {sorted(unknown)}, which its `metrics` do not declare")
        for name, part in reported.items():
            if isinstance(part, Max):
                largest = part.values.max() if len(part.values) else torch.zeros(())
                self._largest[name] = torch.maximum(self._largest.get(name, largest).to(largest), largest)
            elif isinstance(part, Mean) and part.over is not None:
                _add(self._sums, name, part.values[part.over].sum())
                _add(self._counts, name, part.over.sum())
            else:
                _add(self._sums, name, part.values.sum())
                if isinstance(part, Mean):
                    self._means.add(name)

    def merge(self, other: SentSums) -> None:
        """Add the sums of another process, from other rows of the same batch."""
        for mine, theirs in ((self._sums, other.sums), (self._counts, other.counts)):
            for name, value in theirs.items():
                _add(mine, name, torch.from_numpy(value))
        for name, value in other.largest.items():
            largest = torch.from_numpy(value)
            self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)
        self._means |= other.means

    def sent(self) -> SentSums:
        """Return the sums for another process."""
        sums, counts, largest = (
            {name: np.asarray(value.cpu()) for name, value in own.items()}
            for own in (self._sums, self._counts, self._largest)
        )
        return SentSums(sums=sums, counts=counts, largest=largest, means=frozenset(self._means))

    def result(self, trained: int) -> dict[str, float]:
        """Return one number for each metric; a mean over no tokens is NaN. `trained` counts the tokens of all
        micro-batches.
        """
        found = {name: float(value) for name, value in self._largest.items()}
        for name, total in self._sums.items():
            if name in self._counts:
                count = float(self._counts[name])
                found[name] = float(total) / count if count else math.nan
            else:
                found[name] = float(total) / max(trained, 1) if name in self._means else float(total)
        return found


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add a scalar tensor to the sum of `name`, which may be new."""
    sums[name] = sums[name] + value if name in sums else value
