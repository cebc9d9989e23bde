"""Clipped importance sampling policy optimisation (CISPO): the weight of a gradient is bounded, but never dropped.

MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", section 3.1: clipping as in
PPO drops the gradient of rare tokens whose probability has grown, and these begin new thoughts.
"""

from __future__ import annotations

from palestra.algorithms.base import About
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import CISPOLoss
from palestra.algorithms.policy_gradient import ScaledGroupBaseline
from palestra.config import CISPOConfig


class CISPO(ScaledGroupBaseline):
    """CISPO with the group's mean as baseline; by default ratios have an upper bound only."""

    config: CISPOConfig
    about = About(
        summary="GRPO whose ratios are bounded weights of the gradient, so that no token is left out",
        formula="A as in grpo; loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi(token), "
        "mean over all tokens of the batch",
        paper="MiniMax 2025, MiniMax-M1, section 3.1, arXiv:2506.13585",
        needs=("groups of at least two episodes",),
    )

    def loss(self) -> LossSpec:
        """Return the policy gradient with bounded weights."""
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        return LossSpec.of(CISPOLoss(clip_low_threshold=low, clip_high_threshold=high))
