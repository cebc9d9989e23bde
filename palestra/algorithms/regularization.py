"""The penalty of divergence from a reference policy, and the bonus of entropy, beside any algorithm.

Penalty and bonus work with any algorithm: in the loss they are added to the loss that it names, and a penalty in the
reward becomes rewards of single tokens, which an algorithm with a critic spreads over time (Ziegler et al. 2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.kl import KLCoefficient, row_terms
from palestra.algorithms.loss import LossSpec
from palestra.config import AlgorithmConfig
from palestra.types.calls import Floats
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample

REGULARIZATION_METRICS = (
    Metric("kl_coefficient", "ratio", "Coefficient of the penalty of divergence from the reference, in this step."),
    Metric(
        "kl_at_sampling",
        "nats",
        "Divergence KL(sampled || reference) of a token, by `algorithm.kl.estimator`; an adaptive coefficient follows "
        "it. Without meaning for conversations (`sft`), which nothing has sampled.",
    ),
)


class Regularization:
    """Keeps the coefficient of a job's KL penalty, and adds penalty and bonus where the job wants them."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Begin with the configured coefficient.

        Args:
            config: the job's section `[algorithm]`.
        """
        self._kl, self._entropy = config.kl, config.entropy_coefficient
        self._coefficient = None if config.kl is None else KLCoefficient(config.kl.coefficient, config.kl.target)

    @property
    def outputs(self) -> frozenset[ForwardOutput]:
        """Return what the trainer has to compute of the rows: the reference's logprobs, if there is a reference."""
        return frozenset() if self._kl is None else frozenset({"reference_logprobs"})

    def token_rewards(self, rows: Sequence[TrainSample], forward: ForwardOutputs) -> list[Floats] | None:
        """Return the penalty of each trained token as a reward, float32 [N] for each row, 0 elsewhere.

        Args:
            forward: has `reference_logprobs`, if there is a reference.

        Returns:
            None where the penalty is not in the reward.
        """
        if self._kl is None or self._coefficient is None or self._kl.place != "reward":
            return None
        terms = row_terms(rows, forward["reference_logprobs"], self._kl.estimator)
        return [(-self._coefficient.value * term).astype(np.float32) for term in terms]

    def add_to(self, loss: LossSpec) -> LossSpec:
        """Return an algorithm's loss with penalty and bonus, as far as they are in the loss."""
        added: dict[str, Any] = {"entropy_coefficient": self._entropy}
        if self._kl is not None and self._coefficient is not None and self._kl.place == "loss":
            added |= {"kl_coefficient": self._coefficient.value, "kl_estimator": self._kl.estimator}
        return loss.model_copy(update=added)

    def adapt(self, rows: Sequence[TrainSample], forward: ForwardOutputs) -> dict[str, float]:
        """Set the coefficient of the next step by the divergence of this one; returns this step's metrics, by name.

        Args:
            rows: S rows, as they are trained in this step.
            forward: has `reference_logprobs`, if there is a reference.
        """
        if self._kl is None or self._coefficient is None or not rows:
            return {}
        terms = row_terms(rows, forward["reference_logprobs"], self._kl.estimator)
        trained = np.concatenate([term[row.loss_mask] for row, term in zip(rows, terms, strict=True)])
        divergence = float(trained.astype(np.float64).mean()) if len(trained) else float("nan")
        found = {"kl_coefficient": self._coefficient.value, "kl_at_sampling": divergence}
        self._coefficient.adapt(divergence)
        return found

    def state(self) -> dict[str, Any]:
        """Return what is remembered from step to step, as JSON, for the checkpoint."""
        return {} if self._coefficient is None else {"kl_coefficient": self._coefficient.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state from a checkpoint.

        Args:
            state: the result of `state` at the time of the checkpoint; empty in checkpoints without one.
        """
        if self._coefficient is not None and "kl_coefficient" in state:
            self._coefficient.value = float(state["kl_coefficient"])
