"""Advantage actor-critic (A2C): a critic's advantages, and the plain policy gradient.

Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning", section 4; without asynchronous workers.
"""

from __future__ import annotations

from palestra.algorithms.actor_critic import ActorCritic
from palestra.algorithms.base import About
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import ImportanceSamplingLoss
from palestra.config import A2CConfig


class A2C(ActorCritic):
    """A2C: one update per batch, because its loss does not keep a second one near the sampling policy."""

    config: A2CConfig
    about = About(
        summary="a critic's values are the baseline of the plain policy gradient",
        formula="A as in ppo, centred and scaled as there, with lambda 1 by default; loss = -r A, "
        "r = pi(token) / pi_old(token), whose gradient is that of -A log pi(token) where pi is pi_old; "
        "critic: as in ppo",
        paper="Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning, arXiv:1602.01783",
        needs=("memory for a second model with its optimizer: the critic",),
    )

    def loss(self) -> LossSpec:
        """Return the policy gradient's loss, weighted for tokens that another version of the policy sampled."""
        return LossSpec.of(ImportanceSamplingLoss())
