"""The interface of a loss: [T] tensors of the trained tokens go in; a loss of each token, and metrics, come out.

A loss crosses the border to the trainer by its name and its parameters (`LossSpec`), never as a callable, so that the
trainer may be another process. This module loads no torch: a learner names a loss without having it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from palestra.schemas.metrics import Metric

if TYPE_CHECKING:  # a job with a fake trainer loads no torch
    from torch import Tensor

Parameter = bool | int | float | str
LossType = TypeVar("LossType", bound="type[Loss]")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """What a loss sees of the T trained tokens of a micro-batch; without a gradient except where it is said.

    Attributes:
        logprobs: [T] float32, of the policy as it is now, with gradient; of the distribution that was sampled from, at
            the temperature and within the grammar of the call.
        sampling_logprobs: [T] float32, as they were recorded when the token was sampled.
        old_logprobs: [T] float32, of the policy before the step; None where the algorithm does not need them.
        advantages: [T] float32.
        on_policy: [T] bool, whether the token was sampled by the version that the trainer has now.
    """

    logprobs: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor | None
    advantages: Tensor
    on_policy: Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that is the mean over trained tokens.

    Attributes:
        values: [T], without gradient.
        over: [T] bool, the tokens that count; None: all. Where none counts in a whole batch, the metric is left out.
    """

    values: Tensor
    over: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric that is the sum of `values` ([T], without gradient) over trained tokens."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class Max:
    """A metric that is the largest of `values` ([T], without gradient) over trained tokens; 0 where there are none."""

    values: Tensor


Reduction = Mean | Sum | Max


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """What a loss says of T tokens.

    Attributes:
        loss: [T] float32, of each token, with gradient. The trainer multiplies it by the token's loss weight and adds
            all up, so no loss can make an episode count for more than it should.
        metrics: by name, with the rule by which the trainer makes one number of the tokens of all micro-batches.
    """

    loss: Tensor
    metrics: Mapping[str, Reduction]


@dataclass(frozen=True, slots=True)
class LossMetric(Metric):
    """A metric of `forward_backward`: written as `train/<name>` after each step."""

    epoch: Literal["first", "last"] = "last"  # of a step with several epochs, the one whose value is written


class LossSpec(BaseModel):
    """A loss by its name in `LOSSES` and its parameters; JSON carries it over any border unchanged."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    name: str
    parameters: dict[str, Parameter] = {}

    @classmethod
    def of(cls, loss: Loss) -> LossSpec:
        """Return the spec that `build_loss` makes an equal loss of."""
        return cls(name=loss.name, parameters=asdict(loss))  # type: ignore[call-overload]


class Loss(ABC):
    """The loss of a token: a frozen dataclass whose fields are its parameters, and a pure function of tensors.

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

    name: ClassVar[str]  # set by `register_loss`
    metrics: ClassVar[tuple[LossMetric, ...]] = ()  # every name that `LossOutput.metrics` has

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss and the metrics of T tokens."""


LOSSES: dict[str, type[Loss]] = {}
"""Every loss that a trainer of this process can compute, by name."""


def register_loss(name: str) -> Callable[[LossType], LossType]:
    """Return a decorator that enters a class into `LOSSES`.

    Args:
        name: what `LossSpec.name` says; a name that another class has is refused with ValueError.
    """

    def enter(loss: LossType) -> LossType:
        known = LOSSES.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (loss.__module__, loss.__qualname__):
            raise ValueError(f"the loss {name!r} is {known.__module__}.{known.__qualname__} already")
        loss.name = name
        LOSSES[name] = loss
        return loss

    return enter


def token_weights(
    tokens_R: Sequence[int],
    mode: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"],
    max_tokens: int,
) -> list[float]:
    """Return the loss weight of each trained token of each rollout: how the losses of tokens become one number.

    How a rollout is cut into calls or rows does not matter: only its number of trained tokens does. The modes have
    verl's names (`loss_agg_mode`); a sequence is a rollout.

    Args:
        tokens_R: trained tokens of each rollout (episode) of the batch, also of those whose advantage is 0.
        mode: `seq-mean-token-mean`: each rollout weighs the same, its tokens share it (GRPO, DeepSeekMath equation 3);
            `token-mean`: each token weighs the same (DAPO, Yu et al. 2025, equation 8); `seq-mean-token-sum-norm`: each
            token weighs 1 / (rollouts x max_tokens) (Dr. GRPO, Liu et al. 2025).
        max_tokens: the divisor of `seq-mean-token-sum-norm`.

    Returns:
        One weight a rollout, for each of its tokens; 0 where it has none.
    """
    rollouts = sum(1 for tokens in tokens_R if tokens)
    total = sum(tokens_R)
    if mode == "seq-mean-token-mean":
        return [1.0 / (rollouts * tokens) if tokens else 0.0 for tokens in tokens_R]
    each = (1.0 / total if total else 0.0) if mode == "token-mean" else 1.0 / (max(rollouts, 1) * max_tokens)
    return [each if tokens else 0.0 for tokens in tokens_R]
