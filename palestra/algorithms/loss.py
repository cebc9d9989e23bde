"""The interface of a loss: from tensors [T] of the trained tokens to a loss for each token, and metrics.

A loss is passed to the trainer by its name and parameters (`LossSpec`), never as a callable, because the trainer may be
another process. This module does not import torch: a learner names a loss without having torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from palestra.algorithms.kl import KLEstimator
from palestra.types.metrics import Metric

if TYPE_CHECKING:  # a job with a fake trainer loads no torch
    from torch import Tensor

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
        kl_estimator: see `palestra.algorithms.kl`.
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

        A loss can't compute these means itself, because an episode's tokens may be in several rows and micro-batches.

        Args:
            inputs: of a part of the batch, without `sequence_means`; the means have no gradient.
        """
        raise NotImplementedError(f"the loss {self.name!r} is not over sequences")

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss [T] and the metrics of T tokens.

        Args:
            inputs: tensors [T] of the trained tokens; only `inputs.logprobs` has a gradient.
        """


class ValueLoss(BaseLoss):
    """The loss of a critic's value: a pure function of tensors, as a frozen dataclass of its parameters."""

    @abstractmethod
    def __call__(self, inputs: ValueInputs) -> LossOutput:
        """Return the loss [T] and the metrics of T values.

        Args:
            inputs: tensors [T] of the trained tokens; only `inputs.values` has a gradient.
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
