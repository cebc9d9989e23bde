"""Dr. GRPO, "GRPO done right": neither the group's deviation nor a rollout's length divides a gradient.

Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.2: dividing by the deviation
prefers groups that are nearly solved or nearly hopeless, and dividing by the length prefers long wrong rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.algorithms.base import About
from palestra.algorithms.baselines import centred_returns
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.policy_gradient import GroupBaseline, clipped_loss
from palestra.config import DrGRPOConfig


class DrGRPO(GroupBaseline):
    """Dr. GRPO: GRPO with unscaled advantages and equal weights of tokens, whatever the length."""

    config: DrGRPOConfig
    about = About(
        summary="GRPO without division by the deviation or by the length",
        formula="A = R - mean(R) within a group; loss as in grpo, each token's divided by "
        "(rollouts with trained tokens) x max_tokens",
        paper="Liu et al. 2025, Understanding R1-Zero-Like Training, section 3.2, arXiv:2503.20783",
        needs=("groups of at least two episodes",),
    )

    def compare(self, values_G: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return each value minus the group's mean; see `centred_returns`."""
        return centred_returns(values_G, "none")

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)
