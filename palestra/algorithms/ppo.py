"""Proximal policy optimisation (PPO): a critic's advantages, and the clipped surrogate loss.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", algorithm 1 and equation 7.
"""

from __future__ import annotations

from palestra.algorithms.actor_critic import ActorCritic
from palestra.algorithms.base import About
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.policy_gradient import clipped_loss
from palestra.config import PPOConfig


class PPO(ActorCritic):
    """PPO with a critic; an action is a token, or a turn."""

    config: PPOConfig
    about = About(
        summary="a critic's values are the baseline, by token or by turn",
        formula="A = sum over l of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t, "
        "which with advantage_scale = std (the default) becomes (A - mean(A)) / (std(A) + 1e-8) over the batch's "
        "tokens; loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi(token) / pi_old(token); "
        "critic: max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2, R = A + V_old with A "
        "as estimated",
        paper="Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347",
        needs=("memory for a second model with its optimizer: the critic",),
    )

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)
