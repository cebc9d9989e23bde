"""Reduce the metrics of micro-batches to one number each, by the rule that the loss declares for each of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from palestra.algorithms.loss import Max, Mean, Reduction


class MetricSums:
    """Adds up what micro-batches report, in their order, on the device where it was computed."""

    def __init__(self, declared: Collection[str]) -> None:
        """Start with empty sums.

        Args:
            declared: the names that may be reported.
        """
        self._declared = frozenset(declared)
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}  # divisors of means over some of the trained tokens
        self._largest: dict[str, Tensor] = {}
        self._means: set[str] = set()  # metrics that are means over all trained tokens

    def add(self, reported: Mapping[str, Reduction]) -> None:
        """Add the metrics of one micro-batch.

        Args:
            reported: for each metric its values, [T] or scalar tensors, and how they are reduced.

        Raises:
            ValueError: a name is not declared.
        """
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

    def merge(self, other: MetricSums) -> None:
        """Add what another process has added up, of other rows of the same batch."""
        for mine, theirs in ((self._sums, other._sums), (self._counts, other._counts)):
            for name, value in theirs.items():
                _add(mine, name, value)
        for name, largest in other._largest.items():
            self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)
        self._means |= other._means

    def on_cpu(self) -> MetricSums:
        """Return the same sums on the CPU, for another process."""
        found = MetricSums(self._declared)
        for mine, theirs in ((found._sums, self._sums), (found._counts, self._counts), (found._largest, self._largest)):
            mine.update({name: value.cpu() for name, value in theirs.items()})
        found._means = set(self._means)
        return found

    def result(self, trained: int) -> dict[str, float]:
        """Return one number for each metric: NaN for a mean over no tokens.

        Args:
            trained: how many tokens were trained in all micro-batches together.
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
