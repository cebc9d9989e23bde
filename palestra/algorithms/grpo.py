"""Group relative policy optimisation (GRPO): the mean return of a group of episodes is the group's baseline.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", section 4.1.
"""

from __future__ import annotations

from palestra.algorithms.base import About
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.policy_gradient import ScaledGroupBaseline, clipped_loss
from palestra.config import GRPOConfig


class GRPO(ScaledGroupBaseline):
    """GRPO, with credit by episode, TimeStep, agent or branch."""

    config: GRPOConfig
    about = About(
        summary="a group's mean return is its baseline",
        formula="A = (R - mean(R)) / (std(R) + 1e-4) within a group, std of the sample (n - 1); "
        "loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi(token) / pi_old(token)",
        paper="Shao et al. 2024, DeepSeekMath, section 4.1, arXiv:2402.03300",
        needs=("groups of at least two episodes",),
    )

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)
