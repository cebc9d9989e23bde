"""The losses that Palestra ships, and `build_loss`, which makes a loss from its name and parameters."""

from __future__ import annotations

from dataclasses import dataclass, fields

from palestra.algorithms.loss import LOSSES, Loss, LossInputs, LossMetric, LossOutput, LossSpec, Mean, register_loss
from palestra.errors import ConfigError


@register_loss("ppo-clip")
@dataclass(frozen=True, kw_only=True, slots=True)
class PPOClipLoss(Loss):
    """The clipped surrogate of PPO: -min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A).

    The ratio is pi(token) / reference(token). Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation
    7; with unequal bounds as in DAPO (Yu et al. 2025, section 3.1). The reference is the policy before the step if the
    algorithm asked for its logprobs, as in decoupled PPO, and otherwise the distribution that the token was sampled
    from.

    Attributes:
        clip_low: ratios below 1 - clip_low are clipped.
        clip_high: ratios above 1 + clip_high are clipped.
    """

    clip_low: float
    clip_high: float

    metrics = (
        LossMetric("ratio_mean", "ratio", "Mean over trained tokens of pi(token) / reference(token)."),
        LossMetric("clip_fraction", "ratio", "Share of trained tokens where the clipped term is the smaller one."),
        LossMetric(
            "clip_fraction_on_policy",
            "ratio",
            "Share clipped, as above, of the trained tokens that the policy before the step sampled itself, before the "
            "first update: what the gap of logprobs costs. Left out where all tokens are older.",
            epoch="first",
        ),
    )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the clipped surrogate loss, float32 [T], and the metrics of T tokens."""
        reference = inputs.sampling_logprobs if inputs.old_logprobs is None else inputs.old_logprobs
        ratio = (inputs.logprobs - reference).exp()
        plain = ratio * inputs.advantages
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * inputs.advantages
        clipped = (bounded < plain).detach().float()
        return LossOutput(
            loss=-plain.minimum(bounded),
            metrics={
                "ratio_mean": Mean(ratio.detach()),
                "clip_fraction": Mean(clipped),
                "clip_fraction_on_policy": Mean(clipped, over=inputs.on_policy),
            },
        )


def build_loss(spec: LossSpec) -> Loss:
    """Return the loss that a spec names.

    Raises:
        ConfigError: this process has no loss of that name, or the loss has other parameters.
    """
    loss = LOSSES.get(spec.name)
    if loss is None:
        raise ConfigError(f"no loss is named {spec.name!r}; known: {', '.join(sorted(LOSSES))}")
    wanted = {field.name for field in fields(loss)}  # type: ignore[arg-type]
    try:
        return loss(**spec.parameters)
    except TypeError as error:
        raise ConfigError(
            f"the parameters of the loss {spec.name!r} are {sorted(wanted)}, not {sorted(spec.parameters)}"
        ) from error
