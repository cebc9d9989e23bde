"""REINFORCE leave-one-out (RLOO): the baseline of an episode is the mean return of the other episodes of its group.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
LLMs". The baseline does not depend on the episode itself, so the gradient is unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.algorithms.base import About
from palestra.algorithms.baselines import left_out_returns
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.policy_gradient import GroupBaseline, clipped_loss
from palestra.config import RLOOConfig


class RLOO(GroupBaseline):
    """RLOO, with the clipped loss that keeps several updates of one batch near its samples."""

    config: RLOOConfig
    about = About(
        summary="an episode's baseline is the mean return of the other episodes of its group",
        formula="A = R - mean of the other episodes' R; loss as in grpo, each token's divided by "
        "(rollouts with trained tokens) x max_tokens",
        paper="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
        needs=("groups of at least two episodes",),
    )

    def compare(self, values_G: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return each value minus the mean of the other episodes; see `left_out_returns`."""
        return left_out_returns(values_G)

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)
