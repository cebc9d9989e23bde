"""REINFORCE++: advantages are normalised over the whole batch, which is larger than a group and so less biased.

Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization". The
paper subtracts a KL penalty from the reward of each token; here it is in the loss of each token, as for every algorithm
without a critic (`algorithm.kl`).
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
        formula="A = (a - mean(a)) / (std(a) + 1e-4) over the batch, std of the sample (n - 1), "
        "a = R, or R - mean of its group; loss as in grpo, mean over all tokens of the batch",
        paper="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
        needs=("with `baseline = group`: groups of at least two episodes",),
    )

    def learns_from(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether returns differ within the group, if its mean is the baseline; else true."""
        if self.config.baseline == "none":
            return True
        found = group_advantages(self.returns(trajectories), _CENTRED)
        return any(any(values.values()) for values in found.by_key)

    def estimate(self, groups: Sequence[Sequence[Returns]]) -> list[GroupAdvantages]:
        """Return advantages that are normalised over the batch; see `PolicyGradient.estimate`."""
        if self.config.baseline == "none":
            return batch_advantages(groups, _NORMALISED)
        centred = [group_advantages(returns, _CENTRED) for returns in groups]
        found = batch_advantages([_over(*of) for of in zip(groups, centred, strict=True)], _NORMALISED)
        return [
            replace(after, calls_without_peers=before.calls_without_peers)
            for after, before in zip(found, centred, strict=True)
        ]

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)


def _over(returns_G: Sequence[Returns], centred: GroupAdvantages) -> list[Returns]:
    """Return the returns of a group with their advantages over the group's mean as values."""
    return [replace(each, values=values) for each, values in zip(returns_G, centred.by_key, strict=True)]
