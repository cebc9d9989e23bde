"""The interface of a trainer: weights and optimizers of policies, by name, and updates made of rows.

A trainer may be in another process, so no argument is a callable: rows are records, a loss is a name with parameters,
and results are numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from palestra.algorithms.base import CriticKind, ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossMetric, LossSpec
from palestra.config import AdapterConfig, OptimizerConfig, VisionTraining
from palestra.models.weights import WeightSource
from palestra.types.calls import Floats, PolicyVersion
from palestra.types.records import TrainSample


def record_problems(batch: Sequence[TrainSample]) -> dict[str, str]:
    """Return episodes with a number recorded at sampling that is not finite: ids and reasons."""
    return not_finite(
        batch, [{"log-probability": sample.logprobs, "temperature": sample.temperatures} for sample in batch]
    )


def not_finite(batch: Sequence[TrainSample], columns: Sequence[Mapping[str, Floats]]) -> dict[str, str]:
    """Return episodes with a number that is not finite: ids and reasons.

    One such number would make the gradient of the whole step NaN. `columns` has, for each row, float32 [N] by the name
    for the message.
    """
    found: dict[str, str] = {}
    for sample, named in zip(batch, columns, strict=True):
        for name, column in named.items():
            odd = sample.loss_mask & ~np.isfinite(column)
            if odd.any() and sample.episode_id not in found:
                found[sample.episode_id] = f"the {name} of the token at {int(np.argmax(odd))} is not finite"
    return found


TRAINER_METRICS = (
    LossMetric("loss", "nats", "Sum over trained tokens of loss weight x loss of the token, last update of the step."),
    LossMetric("entropy", "nats", "Mean over trained tokens of the policy's entropy at that position."),
    LossMetric(
        "logprob_gap_mean",
        "nats",
        "Mean of |trainer's logprob - engine's logprob| over trained tokens, before the first update of the step: "
        "rounding alone where no token is stale. Not written where recorded episodes are trained.",
        epoch="first",
    ),
    LossMetric("logprob_gap_max", "nats", "Largest such difference.", epoch="first"),
    LossMetric(
        "sampling_kl",
        "nats",
        "Divergence KL(sampled || policy) of a token, by the estimator k3: what staleness, rounding and the step's "
        "earlier updates have moved. Not written where recorded episodes are trained.",
    ),
)
"""What `forward_backward` measures with every loss of the policy, beside the loss's own metrics."""
REFERENCE_METRICS = (
    LossMetric(
        "reference_kl_k1",
        "nats",
        "Divergence KL(policy || reference) of a token: mean over trained tokens of x = log pi - log reference "
        "(Schulman 2020).",
    ),
    LossMetric("reference_kl_k2", "nats", "The same by the estimator k2: mean of x^2 / 2."),
    LossMetric("reference_kl_k3", "nats", "The same by the estimator k3: mean of exp(-x) - 1 + x."),
)
"""What `forward_backward` measures as well where rows have `reference_logprobs`, whatever the penalty's coefficient."""
CRITIC_METRICS = (
    LossMetric("critic_loss", "reward^2", "Sum over trained tokens of loss weight x loss of the value, last epoch."),
)
"""What `forward_backward` measures with every loss of a critic."""
Network = Literal["policy", "critic"]
NETWORKS: tuple[Network, ...] = ("policy", "critic")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """The initial state of a policy: its weights, and the networks used with it.

    Attributes:
        model: a name as in `PolicyConfig.model`, or a folder with weights.
        reference: model of the reference policy, named like `model`. A second, frozen copy of its weights is kept.
            None: no reference.
        teacher: model of the teacher, named like `model`, and frozen like the reference; None: no teacher.
        critic: None: no critic. For `states`, a copy of `model` with one value head. For `actions`, a copy with twin
            heads, and a target copy that follows it. For `replies`, a copy with one head without a bias. With an
            adapter, the copies are adapters on the same base.
        adapter: trained in place of the model's weights, which all networks of that model then share; None: all weights
            are trained.
    """

    model: str
    reference: str | None = None
    teacher: str | None = None
    critic: CriticKind | None = None
    adapter: AdapterConfig | None = None
    seed: int = 0
    vision: VisionTraining | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimParams:
    """The numbers of one AdamW update (Loshchilov and Hutter 2019); weights of norms and biases do not decay.

    Attributes:
        epsilon: added to the root of the second moment, so that the update is finite.
        target_rate: fraction by which the target copy of a critic of actions moves to the critic after the update.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    target_rate: float = 0.0

    @classmethod
    def of(cls, config: OptimizerConfig, learning_rate: float, target_rate: float = 0.0) -> OptimParams:
        """Return the numbers of one update from a job's optimizer section."""
        return cls(
            learning_rate=learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            target_rate=target_rate,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The counts and metrics of one `forward_backward`.

    Attributes:
        trained_tokens: tokens that entered the loss.
        forward_tokens: tokens computed by the model, after shared prefixes were merged.
        flat_tokens: tokens that the model would have computed without merging.
        metrics: `TRAINER_METRICS` and the loss's own, by name; NaN where no token counts.
        logprobs: float32 [N] for each row, NaN at tokens that are not trained; None: not requested.
    """

    rows: int
    trained_tokens: int
    forward_tokens: int
    flat_tokens: int
    metrics: dict[str, float]
    logprobs: tuple[Floats, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimReport:
    """The result of one `optim_step`.

    Attributes:
        applied: False if the gradient was not finite; the weights are then unchanged.
    """

    learning_rate: float
    grad_norm: float
    applied: bool = True


class Trainer(Protocol):
    """Master weights and optimizers of policies, by name.

    A request changes only the policy that it names. Requests are handled one after another. Repeating a `request_id`
    returns the first answer and changes nothing, so a caller may resend a request whose answer was lost. Every method
    raises NotFound for a policy that was not created.
    """

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """Load a policy's weights, and create an optimizer for it. The version is 0.0.

        Raises:
            ConfigError: there is a policy of this name, the reference or the teacher has another tokenizer, or the
                adapter does not fit the model.
            ModelError: missing weights, or an unsupported architecture.
        """
        ...

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """Compute numbers of the trained tokens of rows, without a gradient.

        `old_logprobs` come from the present weights, `values` and `next_values` from a critic of states,
        `action_values` and `target_action_values` from a critic of actions, and `action_values` from one of replies:
        for each output one float32 [N] a row, NaN where the token is not trained. Raises ConfigError: the trainer
        cannot compute one of the outputs.
        """
        ...

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str, logprobs: bool = False
    ) -> StepReport:
        """Add the gradient of a batch to the gradient that the next `optim_step` applies.

        The rows have advantages and loss weights; a critic's loss also needs `values` and `returns`. With `logprobs`
        the report has those of the trained tokens under the present weights. Raises ConfigError: the loss is unknown,
        needs a critic that does not exist, or needs `reference_logprobs` that the rows do not have.
        """
        ...

    async def optim_step(
        self, policy: str, params: OptimParams, request_id: str, network: Network = "policy"
    ) -> OptimReport:
        """Apply the gradient and clear it. The first update after `weights` makes the version's `n` grow by one.
        Updating the critic does not change the version. Raises ConfigError: there is no critic.
        """
        ...

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """Find episodes that cannot be trained because their record contradicts itself.

        The answer depends only on the rows, so a repeated step leaves out the same episodes. Advantages and loss
        weights are not read. The result has the reason for each id.
        """
        ...

    async def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply that can be sampled under a grammar, in order of its token ids.

        Replies are cut at `max_tokens`. Raises ConfigError: there are more replies than `most`. Raises InvalidRequest,
        GrammarRefused, EngineFailure: see `Grammars.walk`.
        """
        ...

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Write a checkpoint of a policy and its critic atomically; `load` restores it bit by bit.

        The checkpoint becomes `step-NNNNNN` in the folder, numbered by `step` in `state` (JSON). Raises
        CheckpointError: the disk is full, or cannot be written to.
        """
        ...

    async def save_weights(self, policy: str, folder: Path, step: int, request_id: str) -> None:
        """Write a policy's weights atomically into a folder that a job can use as its `model`. A folder that exists is
        replaced. Raises CheckpointError: the disk is full, or cannot be written to.
        """
        ...

    async def load(self, policy: str, folder: Path, step: int | None = None) -> dict[str, Any] | None:
        """Restore a policy's newest undamaged checkpoint, or the one of a step.

        Return the `state` that was saved with it; None: there is no checkpoint, and nothing was changed. Raises
        CheckpointError: all checkpoints, or the one of the step, are damaged; or it is a checkpoint of another model.
        """
        ...

    async def remove(self, policy: str) -> None:
        """Forget a policy, its optimizer and its requests, and free the memory."""
        ...

    async def weights(self, policy: str) -> WeightSource:
        """Return the present weights for an engine to read.

        They are valid until the policy's next `optim_step`, which begins a new version.
        """
        ...

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's master weights."""
        ...

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """Set the incarnation of all later versions of a policy.

        A new incarnation means that history before the restart may not have been repeated bit by bit.
        """
        ...

    async def close(self) -> None:
        """Finish the present requests, and free all policies."""
        ...
