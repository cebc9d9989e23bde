"""What is added to any loss: the penalty of divergence from a reference and the bonus of entropy, both measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from palestra.algorithms.kl import KL_ESTIMATORS, kl_terms
from palestra.algorithms.loss import Loss, LossInputs, LossMetric, LossSpec, Mean, Reduction
from palestra.errors import ConfigError
from palestra.trainer.base import REFERENCE_METRICS, TRAINER_METRICS
from palestra.types.records import TrainSample


def measured_with(batch: Sequence[TrainSample]) -> bool:
    """Return whether the divergence from a reference can be measured: the rows have its logprobs."""
    return not batch or batch[0].reference_logprobs is not None


def policy_metrics(spec: LossSpec, loss: Loss, reference: bool) -> tuple[LossMetric, ...]:
    """Return the metrics that a gradient of the policy reports.

    Args:
        spec: of the loss.
        loss: the loss itself.
        reference: whether the rows have the reference's logprobs.

    Raises:
        ConfigError: divergence is to be punished, and the rows have no logprobs of a reference.
    """
    if spec.kl_coefficient and not reference:
        raise ConfigError("a KL penalty needs rows with `reference_logprobs`")
    return (*TRAINER_METRICS, *(REFERENCE_METRICS if reference else ()), *loss.metrics)


def add_penalties(
    losses: Tensor, inputs: LossInputs, entropy: Tensor, spec: LossSpec
) -> tuple[Tensor, dict[str, Reduction]]:
    """Return the losses [T] with penalty and bonus, and what was measured of both, whatever their coefficients.

    Args:
        losses: float32 [T], of the algorithm's loss.
        inputs: of that loss.
        entropy: float32 [T], with gradient if the bonus has a coefficient.
        spec: has the coefficients.
    """
    now = inputs.logprobs.detach()
    # The tokens are of the sampling policy mu, so the mean of k3 with x = log mu - log pi is KL(mu || pi).
    log_ratio = inputs.sampling_logprobs - now
    found: dict[str, Reduction] = {"sampling_kl": Mean(kl_terms(log_ratio, "k3", torch.expm1), log_ratio.isfinite())}
    if inputs.reference_logprobs is not None:
        for estimator in KL_ESTIMATORS:
            terms = kl_terms(now - inputs.reference_logprobs, estimator, torch.expm1)
            found[f"reference_kl_{estimator}"] = Mean(terms)
        if spec.kl_coefficient:
            divergence = inputs.logprobs - inputs.reference_logprobs
            losses = losses + spec.kl_coefficient * kl_terms(divergence, spec.kl_estimator, torch.expm1)
    if spec.entropy_coefficient:
        losses = losses - spec.entropy_coefficient * entropy
    return losses, found
