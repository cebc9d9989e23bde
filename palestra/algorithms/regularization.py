"""KL penalty and entropy bonus, for any algorithm.

In the loss, they are added to the algorithm's loss. A penalty in the reward becomes rewards of single tokens, which an
algorithm with a critic spreads over time (Ziegler et al. 2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import KLCoefficient, LossSpec, row_terms
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
        "it. Not written where recorded episodes are trained.",
    ),
)


class Regularization:
    """Holds the coefficient of a job's KL penalty, and adds penalty and bonus as configured."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._kl, self._entropy = config.kl, config.entropy_coefficient
        self._coefficient = None if config.kl is None else KLCoefficient(config.kl.coefficient, config.kl.target)

    @property
    def outputs(self) -> frozenset[ForwardOutput]:
        """Return the outputs that the trainer must compute: the reference's logprobs, if there is a reference."""
        return frozenset() if self._kl is None else frozenset({"reference_logprobs"})

    def token_rewards(self, rows: Sequence[TrainSample], forward: ForwardOutputs) -> list[Floats] | None:
        """Return the penalty of each trained token as a reward, float32 [N] for each row, 0 elsewhere; None: not in the
        reward. `forward` has `reference_logprobs`, if there is a reference.
        """
        if self._kl is None or self._coefficient is None or self._kl.place != "reward":
            return None
        terms = row_terms(rows, forward["reference_logprobs"], self._kl.estimator)
        return [(-self._coefficient.value * term).astype(np.float32) for term in terms]

    def add_to(self, loss: LossSpec) -> LossSpec:
        """Add penalty and bonus to an algorithm's loss, if they are configured in the loss."""
        added: dict[str, Any] = {"entropy_coefficient": self._entropy}
        if self._kl is not None and self._coefficient is not None and self._kl.place == "loss":
            added |= {"kl_coefficient": self._coefficient.value, "kl_estimator": self._kl.estimator}
        return loss.model_copy(update=added)

    def adapt(self, rows: Sequence[TrainSample], forward: ForwardOutputs) -> dict[str, float]:
        """Set the next step's coefficient from this step's divergence; return this step's metrics by name. `forward`
        has `reference_logprobs`, if there is a reference.
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
        """Return the state to keep from step to step, as JSON, for the checkpoint."""
        return {} if self._coefficient is None else {"kl_coefficient": self._coefficient.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint; it is empty in checkpoints without one."""
        if self._coefficient is not None and "kl_coefficient" in state:
            self._coefficient.value = float(state["kl_coefficient"])
