"""The losses that Palestra ships, and `build_loss`, which creates a loss from its name and parameters.

`cross_entropy`, `importance_sampling`, `ppo`, `cispo` and `dro` are those of the Tinker API, with the same names,
parameters and defaults. For `beta` of `dro` Tinker documents no default; 0.05 is that of its example. Tinker's inputs
are columns of a row: its `weights` are the row's loss weights, its `logprobs` the row's sampling logprobs, and its sum
over tokens is the trainer's where every loss weight is 1.

In the formulas p is the policy's logprob of the token, q the reference's, A the token's advantage, r = exp(p - q), and
sg(x) is x without a gradient. The reference is the policy before the step if the algorithm requested its logprobs, as
in decoupled PPO, and otherwise the distribution that the token was sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from palestra.algorithms.loss import (
    LOSSES,
    Loss,
    LossInputs,
    LossMetric,
    LossOutput,
    LossSpec,
    Max,
    Mean,
    Reduction,
    ValueInputs,
    ValueLoss,
    register_loss,
)
from palestra.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


_ERRORS = (
    LossMetric("critic_error_mean", "reward", "Mean over trained tokens of |value - return|."),
    LossMetric("critic_error_max", "reward", "Largest such difference."),
)


def _errors(inputs: ValueInputs) -> dict[str, Reduction]:
    """Return the metrics of how far values are from their targets; over two heads their mean."""
    error = (inputs.values.detach() - inputs.returns.unsqueeze(-1)).abs().mean(dim=-1)
    return {"critic_error_mean": Mean(error), "critic_error_max": Max(error)}


@register_loss("value-clip")
@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedValueLoss(ValueLoss):
    """The clipped squared error of a critic: max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2.

    As in the code of PPO (Schulman et al. 2017; Engstrom et al. 2020, "Implementation Matters in Deep RL", section 3),
    so that an update cannot move a value further than the clip.

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
        *_ERRORS,
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
            metrics={
                "critic_value_mean": Mean(values.detach()),
                "critic_clip_fraction": Mean(clipped),
                **_errors(inputs),
            },
        )


@register_loss("twin-value")
@dataclass(frozen=True, kw_only=True, slots=True)
class TwinValueLoss(ValueLoss):
    """The squared errors of a critic with twin heads: the sum over both of (Q - R)^2 / 2.

    As in soft actor-critic (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", equation 5).
    """

    metrics = (
        LossMetric("action_value_mean", "reward", "Mean over the actions that were taken of both heads' values."),
        *_ERRORS,
    )

    def __call__(self, inputs: ValueInputs) -> LossOutput:
        """Return the sum of the squared errors, float32 [T], and the metrics of T actions."""
        error = inputs.values - inputs.returns.unsqueeze(-1)
        return LossOutput(
            loss=(error**2).sum(dim=-1) / 2,
            metrics={"action_value_mean": Mean(inputs.values.detach().mean(dim=-1)), **_errors(inputs)},
        )


@register_loss("value-gradient")
@dataclass(frozen=True, kw_only=True, slots=True)
class ValueGradientLoss(ValueLoss):
    """The value times a given factor, R V: the gradient of any loss of values whose derivatives are R."""

    def __call__(self, inputs: ValueInputs) -> LossOutput:
        """Return the products, float32 [T]."""
        (values,) = inputs.values.unbind(-1)
        return LossOutput(loss=values * inputs.returns, metrics={})


_LARGEST = 20.0  # bound of |log ratio| of a clipped loss: e^20 is far beyond any bound of clipping, and finite
_RATIO_MEAN = LossMetric("ratio_mean", "ratio", "Mean over trained tokens of pi(token) / reference(token).")
_CLIP_METRICS = (
    _RATIO_MEAN,
    LossMetric("clip_fraction", "ratio", "Share of trained tokens where the clipped term is the smaller one."),
    LossMetric(
        "clip_fraction_on_policy",
        "ratio",
        "Share clipped, as above, of the trained tokens that the policy before the step sampled itself, before the "
        "first update: what the gap of logprobs costs. Left out where all tokens are older.",
        epoch="first",
    ),
)


@register_loss("cross_entropy")
@dataclass(frozen=True, kw_only=True, slots=True)
class CrossEntropyLoss(Loss):
    """The negative log-likelihood of the token: -p. Loss weights may be negative; advantages are not read."""

    metrics = (LossMetric("nll", "nats", "Mean over trained tokens of -log pi(token)."),)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return -p, float32 [T], and the metrics of T tokens."""
        return LossOutput(loss=-inputs.logprobs, metrics={"nll": Mean(-inputs.logprobs.detach())})


@register_loss("importance_sampling")
@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceSamplingLoss(Loss):
    """The policy gradient, corrected for the sampling distribution: -r A, without bounds.

    If the policy itself sampled the token, r is 1, and the gradient is REINFORCE's: -A grad p (Williams 1992).
    """

    metrics = (_RATIO_MEAN,)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return -r A, float32 [T], and the metrics of T tokens."""
        ratio = (inputs.logprobs - reference_logprobs(inputs)).exp()
        return LossOutput(loss=-ratio * inputs.advantages, metrics={"ratio_mean": Mean(ratio.detach())})


@register_loss("ppo")
@dataclass(frozen=True, kw_only=True, slots=True)
class PPOClipLoss(Loss):
    """The clipped surrogate of PPO: -min(r A, clip(r, low, high) A).

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; with unequal bounds as in DAPO (Yu et
    al. 2025, section 3.1).
    """

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    metrics = _CLIP_METRICS

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the clipped surrogate loss, float32 [T], and the metrics of T tokens."""
        ratio = _ratio(inputs.logprobs - reference_logprobs(inputs))
        return _clipped_surrogate(ratio, inputs, self.clip_low_threshold, self.clip_high_threshold)


@register_loss("gspo")
@dataclass(frozen=True, kw_only=True, slots=True)
class GSPOLoss(Loss):
    """The clipped surrogate with the ratio of the whole sequence: -min(s A, clip(s, low, high) A).

    s = exp(m + p - sg(p)), where m is the mean of sg(p - q) over the trained tokens of the episode, in all rows and
    micro-batches: s has the value of the sequence's ratio, and the gradient of the token. Zheng et al. 2025, "Group
    Sequence Policy Optimization", equations 14 to 16 (GSPO-token). If all tokens of a sequence have one advantage and
    one loss weight, this is GSPO itself (equation 5), in value, in clipping and in its gradient: the n tokens of a
    sequence have A s grad(p_t) / n each, whose sum is A grad(s). So gradients need not pass between micro-batches.
    """

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    metrics = _CLIP_METRICS
    over_sequences = True

    def of_sequence(self, inputs: LossInputs) -> Tensor:
        """Return p - q, float32 [T]; its mean over a sequence is the logarithm of the sequence's ratio."""
        return inputs.logprobs - reference_logprobs(inputs)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the clipped surrogate loss, float32 [T], and the metrics of T tokens."""
        assert inputs.sequence_means is not None
        ratio = _ratio(inputs.sequence_means + inputs.logprobs - inputs.logprobs.detach())
        return _clipped_surrogate(ratio, inputs, self.clip_low_threshold, self.clip_high_threshold)


@register_loss("cispo")
@dataclass(frozen=True, kw_only=True, slots=True)
class CISPOLoss(Loss):
    """The policy gradient with a bounded weight: -sg(clip(r, low, high)) A p. No token loses its gradient.

    MiniMax 2025, "MiniMax-M1", equation 4; Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute". By
    default only the upper bound is active.
    """

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0

    metrics = (
        _RATIO_MEAN,
        LossMetric("bounded_fraction", "ratio", "Share of trained tokens whose ratio is outside of the bounds."),
    )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss, float32 [T], and the metrics of T tokens."""
        ratio = (inputs.logprobs.detach() - reference_logprobs(inputs)).exp()
        weight = ratio.clamp(self.clip_low_threshold, self.clip_high_threshold)
        return LossOutput(
            loss=-weight * inputs.advantages * inputs.logprobs,
            metrics={"ratio_mean": Mean(ratio), "bounded_fraction": Mean((weight != ratio).float())},
        )


@register_loss("dro")
@dataclass(frozen=True, kw_only=True, slots=True)
class DROLoss(Loss):
    """Direct reward optimisation: -(p A - beta / 2 (p - q)^2); the square keeps the policy near the reference.

    Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language Models Alignment".
    """

    beta: float = 0.05

    metrics = (
        LossMetric(
            "log_ratio_squared", "nats^2", "Mean over trained tokens of (log pi(token) - log reference(token))^2."
        ),
    )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss, float32 [T], and the metrics of T tokens."""
        squared = (inputs.logprobs - reference_logprobs(inputs)) ** 2
        return LossOutput(
            loss=-(inputs.logprobs * inputs.advantages - 0.5 * self.beta * squared),
            metrics={"log_ratio_squared": Mean(squared.detach())},
        )


def reference_logprobs(inputs: LossInputs) -> Tensor:
    """Return the logprobs [T] in the denominator of ratios: those before the step, or those at sampling."""
    return inputs.sampling_logprobs if inputs.old_logprobs is None else inputs.old_logprobs


def build_loss(spec: LossSpec) -> Loss | ValueLoss:
    """Create the loss of a spec."""
    loss = LOSSES.get(spec.name)
    if loss is None:
        raise ConfigError(f"no loss is named {spec.name!r}; known: {', '.join(sorted(LOSSES))}")
    wanted = {field.name for field in fields(loss)}  # type: ignore[arg-type]
    try:
        built = loss(**spec.parameters)
    except TypeError as error:
        raise ConfigError(
            f"the parameters of the loss {spec.name!r} are {sorted(wanted)}, not {sorted(spec.parameters)}"
        ) from error
    assert isinstance(built, Loss | ValueLoss)
    return built


def _ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), [T], within e^-20 and e^20: an overflow would make the gradient NaN (0 x infinity)."""
    return log_ratio.clamp(-_LARGEST, _LARGEST).exp()


def _clipped_surrogate(ratio: Tensor, inputs: LossInputs, low: float, high: float) -> LossOutput:
    """Return -min(ratio A, clip(ratio, low, high) A) and its metrics; the ratio [T] has a gradient."""
    plain = ratio * inputs.advantages
    bounded = ratio.clamp(low, high) * inputs.advantages
    clipped = (bounded < plain).detach().float()
    return LossOutput(
        loss=-plain.minimum(bounded),
        metrics={
            "ratio_mean": Mean(ratio.detach()),
            "clip_fraction": Mean(clipped),
            "clip_fraction_on_policy": Mean(clipped, over=inputs.on_policy),
        },
    )
