"""Group sequence policy optimisation (GSPO): clips the probability ratio of the whole sequence.

Zheng et al. 2025, "Group Sequence Policy Optimization": rewards are given to sequences, so the off-policy correction
should be per sequence too; the geometric mean over tokens keeps it in one range for all lengths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from palestra.algorithms.base import About, ForwardOutputs, Group, TokenAdvantages
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import GSPOLoss
from palestra.algorithms.policy_gradient import ScaledGroupBaseline
from palestra.config import GSPOConfig
from palestra.types.calls import Floats
from palestra.types.records import TrainSample


class GSPO(ScaledGroupBaseline):
    """GSPO; a sequence is an episode, of any number of calls, as in `loss_agg_mode`."""

    config: GSPOConfig
    about = About(
        summary="GRPO with one probability ratio for the whole sequence",
        formula="A as in grpo; loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), "
        "s = exp(mean over the sequence's tokens of log(pi / pi_old))",
        paper="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071",
        needs=("groups of at least two episodes",),
    )

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return the advantage of each token: of its call or, in the form `sequence`, the mean over its episode.

        Args:
            forward: has `old_logprobs` if importance sampling is configured.
        """
        found = super().advantages(groups, forward)
        if self.config.form == "token":
            return found
        rows = [row for group in groups for row in group.rows]
        return replace(found, advantages=episode_means(rows, found.advantages))

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of sequences, with the configured bounds."""
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        return LossSpec.of(GSPOLoss(clip_low_threshold=low, clip_high_threshold=high))


def episode_means(rows: Sequence[TrainSample], values: Sequence[Floats]) -> list[Floats]:
    """Return for each token the mean over all trained tokens of its episode, float32 [N] for each row.

    Args:
        rows: of a batch; an episode may have several.
        values: float32 [N] for each row.
    """
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row, column in zip(rows, values, strict=True):
        entry = sums[row.episode_id]
        entry[0] += float(column[row.loss_mask].sum(dtype=np.float64))
        entry[1] += float(row.loss_mask.sum())
    means = {name: total / max(count, 1.0) for name, (total, count) in sums.items()}
    return [np.full(len(row.ids), means[row.episode_id], np.float32) for row in rows]
