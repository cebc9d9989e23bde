"""Means over whole sequences, for losses that need them: an episode may be split over several micro-batches.

Means have no gradient, so micro-batches stay independent. A micro-batch with only whole episodes computes its own
means. The others are computed once more beforehand, without a gradient, so that the result does not depend on packing
or on the size of micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from palestra.trainer.packing import MicroBatch


class SequenceMeans:
    """The mean of a number over the trained tokens of each episode of a batch."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Find the micro-batches that have a part of an episode only."""
        episodes = [{sample.episode_id for sample, _, _ in micro.samples} for micro in micro_batches]
        parts = Counter(name for names in episodes for name in names)
        self.split = [
            micro
            for micro, names in zip(micro_batches, episodes, strict=True)
            if any(parts[name] > 1 for name in names)
        ]
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, micro: MicroBatch, values: Tensor) -> None:
        """Add the numbers [T] of the trained tokens of a micro-batch of `split`.

        Args:
            values: [T], of its trained tokens.
        """
        _add(self._sums, micro, values)

    def of(self, micro: MicroBatch, values: Tensor) -> Tensor:
        """Return for each trained token of a micro-batch the mean over its episode, float32 [T], without a gradient.

        All micro-batches of `split` must have been added before.

        Args:
            values: [T], of its trained tokens.
        """
        sums = self._sums
        if not any(micro is other for other in self.split):
            sums = defaultdict(lambda: [0.0, 0.0])
            _add(sums, micro, values)
        columns = [
            np.full(int(sample.loss_mask.sum()), sums[sample.episode_id][0] / max(sums[sample.episode_id][1], 1.0))
            for sample, _, _ in micro.samples
        ]
        return torch.from_numpy(np.concatenate(columns)).to(values.device, torch.float32)


def _add(sums: defaultdict[str, list[float]], micro: MicroBatch, values: Tensor) -> None:
    """Add the numbers [T] of a micro-batch to the sum and count of each of its episodes.

    A token without a number does not count: it was not sampled, so it has no sampling logprob.
    """
    column = values.detach().double().cpu().numpy()
    start = 0
    for sample, _, _ in micro.samples:
        stop = start + int(sample.loss_mask.sum())
        entry = sums[sample.episode_id]
        own = column[start:stop]
        entry[0] += float(np.nansum(own))
        entry[1] += int((~np.isnan(own)).sum())
        start = stop
