"""Base of algorithms with a critic: advantages by GAE from the critic's values, and the critic's targets.

The critic has its own optimizer, and learns the returns that GAE estimates (lambda-returns).

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", algorithm 1 and equation 7.

Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning", section 4; without asynchronous workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.algorithms.base import About, Algorithm, CriticUpdate, ForwardOutputs, Group, StepOrder, TokenAdvantages
from palestra.algorithms.gae import Chain, chains_of, explained_variance, generalized_advantages
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import ClippedValueLoss, ImportanceSamplingLoss
from palestra.algorithms.named_rewards import scored_episodes
from palestra.algorithms.policy_gradient import clipped_loss
from palestra.config import A2CConfig, ActorCriticConfig, PPOConfig
from palestra.types.calls import Floats
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample

VALUE_CLIP = 0.2  # most by which an update moves a value from that before the step, as in Schulman's code
_EPSILON = 1e-8  # added to the deviation of the batch's advantages, as in Stable-Baselines3


class ActorCritic(Algorithm):
    """An algorithm whose token advantages come from a critic and GAE."""

    config: ActorCriticConfig
    metrics = (
        Metric(
            "explained_variance",
            "ratio",
            "1 - Var(return - value) / Var(return) over trained tokens, of the critic before the step: 1 for a perfect "
            "critic, 0 for a constant one. Left out where all returns are equal.",
        ),
        Metric("return_mean", "reward", "Mean over trained tokens of the return that the critic learns."),
        Metric("advantage_std", "reward", "Deviation over trained tokens of the advantages, before they are scaled."),
    )

    def __init__(self, config: ActorCriticConfig, step_order: StepOrder = "observed") -> None:
        """Keep the settings, and ask for the critic's values. See `Algorithm`."""
        super().__init__(config, step_order)
        self.needs = frozenset({"values", "next_values"})
        critic = config.critic
        self.critic = CriticUpdate(
            loss=LossSpec.of(ClippedValueLoss(clip=VALUE_CLIP)),
            optimizer=critic.optimizer,
            epochs=critic.epochs,
            warmup_steps=critic.warmup_steps,
        )

    def advantages(self, groups: Sequence[Group], forward: ForwardOutputs) -> TokenAdvantages:
        """Return each token's advantage by GAE, scaled as configured, and the critic's target."""
        rows = [row for group in groups for row in group.rows]
        if not rows:
            return TokenAdvantages(advantages=[], returns=[], metrics={})
        found = generalized_advantages(
            self._chains(groups),
            rows,
            forward["values"],
            forward["next_values"],
            discount=self.config.discount,
            decay=self.config.gae_lambda,
            level=self.config.gae_level,
        )
        advantages, returns = _trained(rows, found.advantages), _trained(rows, found.returns)
        centre, deviation = float(advantages.mean()), float(advantages.std())
        scaled: list[Floats] = found.advantages
        if self.config.advantage_scale == "std":
            scaled = [((column - centre) / (deviation + _EPSILON)).astype(np.float32) for column in found.advantages]
        return TokenAdvantages(
            advantages=scaled,
            returns=found.returns,
            metrics={
                "explained_variance": explained_variance(_trained(rows, forward["values"]), returns),
                "return_mean": float(returns.mean()),
                "advantage_std": deviation,
            },
        )

    def _chains(self, groups: Sequence[Group]) -> list[Chain]:
        """Return the chains of all episodes; rows are numbered over all groups."""
        return [
            chain
            for trajectory, rows in scored_episodes(groups, self.config)
            for chain in chains_of(trajectory, rows, self.config.credit, self.config.discount, self.step_order)
        ]


def _trained(rows: Sequence[TrainSample], columns: Sequence[Floats]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the numbers of all trained tokens, float64 [T]."""
    return np.concatenate([column[row.loss_mask].astype(np.float64) for row, column in zip(rows, columns, strict=True)])


class PPO(ActorCritic):
    """PPO with a critic; an action is a token, or a turn."""

    config: PPOConfig
    about = About(
        summary="a critic's values are the baseline, by token or by turn",
        formula="A = sum over l of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t, "
        "which with advantage_scale = std (the default) becomes (A - mean(A)) / (std(A) + 1e-8) over the batch's "
        "tokens; loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi(token) / pi_old(token); "
        f"critic: max((V - R)^2, (clip(V, V_old - {VALUE_CLIP:g}, V_old + {VALUE_CLIP:g}) - R)^2) / 2, "
        "R = A + V_old with A as estimated",
        paper="Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347",
        needs=("memory for a second model with its optimizer: the critic",),
    )

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)


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
