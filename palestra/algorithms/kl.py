"""KL divergence to a reference policy, estimated from sampled tokens, and the coefficient of its penalty.

Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html): with x = log pi(token) - log
reference(token), k1 = x, k2 = x^2 / 2 and k3 = exp(-x) - 1 + x. The mean over tokens of pi of k1 and of k3 is the
divergence KL(pi || reference); k2 has a small bias and, as a loss, the divergence's exact gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from palestra.types.calls import Floats
from palestra.types.records import TrainSample

KLEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")
Numbers = TypeVar("Numbers")
_LARGEST = 20.0  # bound of -x in the exponent of k3: e^20 is far beyond any useful policy, and finite


def kl_terms(log_ratio: Any, estimator: KLEstimator, expm1: Callable[[Any], Any] = np.expm1) -> Any:
    """Return the estimator's term of each token, [T].

    Args:
        log_ratio: [T], log pi(token) - log reference(token), a numpy array or a torch tensor.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio * log_ratio / 2
    return expm1((-log_ratio).clip(-_LARGEST, _LARGEST)) + log_ratio


def row_terms(
    rows: Sequence[TrainSample], reference_logprobs: Sequence[Floats], estimator: KLEstimator
) -> list[Floats]:
    """Return the estimator's term of each trained token at sampling, float32 [N] for each row, 0 elsewhere.

    Args:
        rows: S rows with the logprobs recorded at sampling.
        reference_logprobs: float32 [N] for each row.
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
    1, -0.2, 0.2), the coefficient is multiplied by 1 + rate x e after each step.

    Attributes:
        value: of the present step.
    """

    def __init__(self, initial: float, target: float | None = None, rate: float = 0.1) -> None:
        """Begin with the first step's coefficient.

        Args:
            target: divergence in nats per token; None: the coefficient is fixed.
        """
        self.value, self._target, self._rate = initial, target, rate

    def adapt(self, divergence: float) -> None:
        """Set the next step's coefficient, unless the divergence is not finite (no tokens).

        Args:
            divergence: of this step, in nats per token.
        """
        if self._target is not None and np.isfinite(divergence):
            error = float(np.clip(divergence / self._target - 1.0, -0.2, 0.2))
            self.value *= 1.0 + self._rate * error
