"""An algorithm as a user writes one, with its own loss: REINFORCE, whose baseline is the batch's mean reward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palestra.algorithms.base import Algorithm, TokenAdvantages
from palestra.algorithms.loss import Loss, LossMetric, LossOutput, LossSpec, Max, Mean, Sum, register_loss
from palestra.types.metrics import Metric


@register_loss("surprise")
@dataclass(frozen=True)
class SurpriseLoss(Loss):
    scale: float

    metrics = (
        LossMetric("surprise_mean", "nats", "Mean over trained tokens of -log pi(token)."),
        LossMetric("surprise_max", "nats", "Largest -log pi(token).", epoch="first"),
        LossMetric("advantage_sum", "reward", "Sum over trained tokens of their advantage."),
    )

    def __call__(self, inputs):
        surprise = -inputs.logprobs.detach()
        return LossOutput(
            loss=-self.scale * inputs.advantages * inputs.logprobs,
            metrics={
                "surprise_mean": Mean(surprise),
                "surprise_max": Max(surprise),
                "advantage_sum": Sum(inputs.advantages),
            },
        )


class Surprise(Algorithm):
    metrics = (Metric("baseline", "reward", "Mean reward of the batch."),)

    def advantages(self, groups, forward):
        rewards = {t.episode.episode_id: t.episode.reward for group in groups for t in group.trajectories}
        baseline = sum(rewards.values()) / len(rewards)
        rows = [row for group in groups for row in group.rows]
        return TokenAdvantages(
            advantages=[np.full(len(row.ids), rewards[row.episode_id] - baseline, np.float32) for row in rows],
            metrics={"baseline": baseline},
        )

    def loss(self):
        return LossSpec.of(SurpriseLoss(scale=0.5))
