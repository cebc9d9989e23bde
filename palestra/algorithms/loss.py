"""The interface of a loss: from tensors [T] of the trained tokens to a loss for each token, and metrics.

Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html): with x = log pi(token) - log
reference(token), k1 = x, k2 = x^2 / 2 and k3 = exp(-x) - 1 + x. The mean over tokens of pi of k1 and of k3 is the
divergence KL(pi || reference); k2 has a small bias and, as a loss, the divergence's exact gradient.

A loss is passed to the trainer by its name and parameters (`LossSpec`), never as a callable, because the trainer may be
another process. This module does not import torch: a learner names a loss without having torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from palestra.types.calls import Floats
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")
_KL_RATE = 0.1  # of the coefficient, for each step and unit of the clipped error
_LARGEST = 20.0  # bound of -x in the exponent of k3: e^20 is far beyond any useful policy, and finite


def kl_terms(log_ratio: Any, estimator: KLEstimator, expm1: Callable[[Any], Any] = np.expm1) -> Any:
    """Return the estimator's term of each token, [T]. `log_ratio` [T] is log pi(token) - log reference(token), a numpy
    array or a torch tensor.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio * log_ratio / 2
    return expm1((-log_ratio).clip(-_LARGEST, _LARGEST)) + log_ratio


def row_terms(
    rows: Sequence[TrainSample], reference_logprobs: Sequence[Floats], estimator: KLEstimator
) -> list[Floats]:
    """Return the estimator's term of each trained token at sampling, float32 [N] for each row, 0 elsewhere. `rows` have
    the logprobs recorded at sampling; those of the reference are float32 [N] for each row.
    """
    return [
        np.where(row.loss_mask, kl_terms(row.logprobs.astype(np.float64) - reference, estimator), 0.0).astype(
            np.float32
        )
        for row, reference in zip(rows, reference_logprobs, strict=True)
    ]


class KLCoefficient:
    """The coefficient of a KL penalty: fixed, or adapted to keep the divergence near a target.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2: with e = clip(KL / target -
    1, -0.2, 0.2), the coefficient is multiplied by 1 + 0.1 e after each step.

    Attributes:
        value: of the present step.
    """

    def __init__(self, initial: float, target: float | None = None) -> None:
        """Begin with the first step's coefficient. `target` is a divergence in nats per token; None: the coefficient is
        fixed.
        """
        self.value, self._target = initial, target

    def adapt(self, divergence: float) -> None:
        """Set the next step's coefficient, unless the divergence is not finite (no tokens). The divergence is this
        step's, in nats per token.
        """
        if self._target is not None and np.isfinite(divergence):
            error = float(np.clip(divergence / self._target - 1.0, -0.2, 0.2))
            self.value *= 1.0 + _KL_RATE * error


Parameter = bool | int | float | str
LossType = TypeVar("LossType", bound="type[BaseLoss]")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """The inputs of a loss for the T trained tokens of a micro-batch; only `logprobs` has a gradient.

    Attributes:
        logprobs: float32 [T], under the present policy, with gradient, in the distribution that was sampled: at the
            call's temperature and within its grammar.
        sampling_logprobs: float32 [T], recorded at sampling.
        old_logprobs: float32 [T], under the policy before the step; None if the algorithm does not need them.
        reference_logprobs: float32 [T], under the reference policy; None without one.
        advantages: float32 [T].
        on_policy: bool [T], whether the trainer's present version sampled the token.
        sequence_means: float32 [T], the mean of `Loss.of_sequence` over all trained tokens of the token's episode in
            the batch; None unless the loss is `over_sequences`.
    """

    logprobs: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None = None
    advantages: Tensor
    on_policy: Tensor
    sequence_means: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueInputs:
    """The inputs of a critic's loss for the T trained tokens of a micro-batch; only `values` has a gradient.

    Attributes:
        values: float32 [T, H], of the critic's H heads, with gradient: of the states before the tokens or, with twin
            heads, of the actions that end with the tokens.
        old_values: float32 [T], of the critic before the step; None if the algorithm does not need them.
        returns: float32 [T], the targets.
    """

    values: Tensor
    old_values: Tensor | None
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that is the mean over trained tokens.

    Attributes:
        values: [T], without gradient.
        over: bool [T], the tokens to include; None: all. Without any token in the batch, the metric is left out.
    """

    values: Tensor
    over: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric that is the sum of `values` ([T], without gradient) over trained tokens."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class Max:
    """A metric that is the maximum of `values` ([T], without gradient) over trained tokens; 0 without tokens."""

    values: Tensor


Reduction = Mean | Sum | Max


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The result of a loss for T tokens.

    Attributes:
        loss: float32 [T], the loss of each token, with gradient. The trainer multiplies it by the token's loss weight
            and sums, so that no loss can give an episode too much weight.
        metrics: by name, each with its reduction over the tokens of all micro-batches.
    """

    loss: Tensor
    metrics: Mapping[str, Reduction]


@dataclass(frozen=True, slots=True)
class LossMetric(Metric):
    """A metric of a loss, written as `train/<name>` after each step."""

    epoch: Literal["first", "last"] = "last"  # the update of a step whose value is written; one an epoch and minibatch


class LossSpec(BaseModel):
    """A loss by its name in `LOSSES`, with its parameters and additional terms, as JSON.

    Any loss of a policy may have two additional terms: a KL penalty, for which the rows need reference logprobs, and an
    entropy bonus. A critic's loss has neither.

    Attributes:
        name: of the loss.
        parameters: of the loss, by name.
        kl_coefficient: factor of the KL estimator's term of each token.
        kl_estimator: see `palestra.algorithms.loss`.
        entropy_coefficient: factor of each token's entropy, which is subtracted from its loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    name: str
    parameters: dict[str, Parameter] = {}
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0

    @classmethod
    def of(cls, loss: BaseLoss) -> LossSpec:
        """Return the spec from which `build_loss` makes an equal loss."""
        return cls(name=loss.name, parameters=asdict(loss))  # type: ignore[call-overload]


class BaseLoss(ABC):
    """Base of losses of policy and critic: a name, parameters, and metrics."""

    name: ClassVar[str]  # set by `register_loss`
    metrics: ClassVar[tuple[LossMetric, ...]] = ()  # all metrics that `LossOutput.metrics` contains


class Loss(BaseLoss):
    """The loss of a token: a pure function of tensors, as a frozen dataclass whose fields are the loss's parameters.

    Example:
        ```python
        @register_loss("reinforce")
        @dataclass(frozen=True)
        class Reinforce(Loss):
            metrics = (LossMetric("surprise", "nats", "Mean over trained tokens of -log pi(token)."),)

            def __call__(self, inputs):
                surprise = Mean(-inputs.logprobs.detach())
                return LossOutput(loss=-inputs.advantages * inputs.logprobs, metrics={"surprise": surprise})
        ```
    """

    over_sequences: ClassVar[bool] = False  # whether `LossInputs.sequence_means` are needed

    def of_sequence(self, inputs: LossInputs) -> Tensor:
        """Return [T] numbers, whose means over whole episodes the trainer puts into `LossInputs.sequence_means`.

        A loss cannot compute these means itself, because an episode's tokens may be in several rows and micro-batches.

        Args:
            inputs: of a part of the batch, without `sequence_means`; the means have no gradient.
        """
        raise NotImplementedError(f"the loss {self.name!r} is not over sequences")

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss [T] and the metrics of T tokens. Inputs are tensors [T] of the trained tokens; only
        `inputs.logprobs` has a gradient.
        """


class ValueLoss(BaseLoss):
    """The loss of a critic's value: a pure function of tensors, as a frozen dataclass of its parameters."""

    @abstractmethod
    def __call__(self, inputs: ValueInputs) -> LossOutput:
        """Return the loss [T] and the metrics of T values. Inputs are tensors [T] of the trained tokens; only
        `inputs.values` has a gradient.
        """


LOSSES: dict[str, type[BaseLoss]] = {}
"""Every loss that a trainer of this process can compute, by name."""


def register_loss(name: str) -> Callable[[LossType], LossType]:
    """Return a class decorator that adds a loss to `LOSSES`.

    Args:
        name: name of the loss, as in `LossSpec.name`.

    Raises:
        ValueError: another class has this name.
    """

    def enter(loss: LossType) -> LossType:
        known = LOSSES.get(name)
        # The same class may be registered twice, when its module is imported again.
        if known is not None and (known.__module__, known.__qualname__) != (loss.__module__, loss.__qualname__):
            raise ValueError(f"the loss {name!r} is {known.__module__}.{known.__qualname__} already")
        loss.name = name
        LOSSES[name] = loss
        return loss

    return enter
