"""REINFORCE++: advantages are normalised over the whole batch, which is larger than a group and so less biased.

Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from palestra.algorithms.base import About
from palestra.algorithms.baselines import GroupAdvantages, batch_advantages, centred_returns, group_advantages
from palestra.algorithms.credit import Returns
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.policy_gradient import PolicyGradient, clipped_loss
from palestra.config import ReinforcePPConfig
from palestra.types.records import Trajectory

_NORMALISED = partial(centred_returns, scale="std")
_CENTRED = partial(centred_returns, scale="none")


class ReinforcePP(PolicyGradient):
    """REINFORCE++, and with `baseline = group` REINFORCE++-baseline."""

    config: ReinforcePPConfig
    about = About(
        summary="advantages are normalised over the whole batch, with or without the group's mean as baseline",
        formula="A = (a - mean(a)) / (std(a) + 1e-4) over the batch, a = R, or R - mean of its group; loss as in grpo, "
        "mean over all tokens of the batch",
        paper="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
        needs=("with `baseline = group`: groups of at least two episodes",),
    )

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether returns differ within the group, where its mean is the baseline; else true."""
        if self.config.baseline == "none":
            return True
        (found,) = self._centred([self.returns(trajectories)])
        return any(any(returns.values.values()) for returns in found)

    def estimate(self, groups: Sequence[Sequence[Returns]]) -> list[GroupAdvantages]:
        """Return advantages that are normalised over the batch; see `PolicyGradient.estimate`."""
        return batch_advantages(groups if self.config.baseline == "none" else self._centred(groups), _NORMALISED)

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)

    def _centred(self, groups: Sequence[Sequence[Returns]]) -> list[list[Returns]]:
        """Return returns minus the mean of their groups."""
        return [
            [
                replace(each, values=values)
                for each, values in zip(returns, group_advantages(returns, _CENTRED).by_key, strict=True)
            ]
            for returns in groups
        ]
