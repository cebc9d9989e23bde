"""The losses of critics: distances between values and returns."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.algorithms.loss import LossMetric, LossOutput, Mean, ValueInputs, ValueLoss, register_loss


@register_loss("value-clip")
@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedValueLoss(ValueLoss):
    """The clipped squared error of a critic: max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2.

    As in the code of PPO (Schulman et al. 2017; Engstrom et al. 2020, "Implementation Matters in Deep RL", section 3),
    so that an update can't move a value further than the clip.

    Attributes:
        clip: largest change of a value in a step; 0: unlimited.
    """

    clip: float = 0.2

    metrics = (
        LossMetric(
            "critic_value_mean", "reward", "Mean over trained tokens of the critic's value of the state before."
        ),
        LossMetric(
            "critic_clip_fraction", "ratio", "Share of trained tokens where the clipped error is the larger one."
        ),
    )

    def __call__(self, inputs: ValueInputs) -> LossOutput:
        """Return the clipped squared error, float32 [T], and the metrics of T values."""
        (values,) = inputs.values.unbind(-1)
        loss = (values - inputs.returns) ** 2
        clipped = loss.new_zeros(loss.shape)
        if self.clip:
            assert inputs.old_values is not None
            near = inputs.old_values + (values - inputs.old_values).clamp(-self.clip, self.clip)
            bounded = (near - inputs.returns) ** 2
            clipped = (bounded > loss).detach().float()
            loss = loss.maximum(bounded)
        return LossOutput(
            loss=loss / 2,
            metrics={"critic_value_mean": Mean(values.detach()), "critic_clip_fraction": Mean(clipped)},
        )


@register_loss("twin-value")
@dataclass(frozen=True, kw_only=True, slots=True)
class TwinValueLoss(ValueLoss):
    """The squared errors of a critic with twin heads: the sum over both of (Q - R)^2 / 2.

    As in soft actor-critic (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", equation 5).
    """

    metrics = (
        LossMetric("action_value_mean", "reward", "Mean over the actions that were taken of both heads' values."),
    )

    def __call__(self, inputs: ValueInputs) -> LossOutput:
        """Return the sum of the squared errors, float32 [T], and the metrics of T actions."""
        error = inputs.values - inputs.returns.unsqueeze(-1)
        return LossOutput(
            loss=(error**2).sum(dim=-1) / 2, metrics={"action_value_mean": Mean(inputs.values.detach().mean(dim=-1))}
        )
