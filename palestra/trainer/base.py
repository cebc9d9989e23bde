"""The interface of a trainer: weights and optimizers of policies, by name, and updates made of rows.

A trainer may be in another process, so no argument is a callable: rows are records, a loss is a name with parameters,
and results are numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossMetric, LossSpec
from palestra.config import AdapterConfig, OptimizerConfig, VisionTraining
from palestra.models.weights import WeightSource
from palestra.types.calls import Floats, PolicyVersion
from palestra.types.records import TrainSample

TRAINER_METRICS = (
    LossMetric("loss", "nats", "Sum over trained tokens of loss weight x loss of the token, last update of the step."),
    LossMetric("entropy", "nats", "Mean over trained tokens of the policy's entropy at that position."),
    LossMetric(
        "logprob_gap_mean",
        "nats",
        "Mean of |trainer's logprob - engine's logprob| over trained tokens, before the first update of the step: "
        "rounding alone where no token is stale. Without meaning for conversations (`sft`), which nothing has sampled.",
        epoch="first",
    ),
    LossMetric("logprob_gap_max", "nats", "Largest such difference.", epoch="first"),
    LossMetric(
        "sampling_kl",
        "nats",
        "Divergence KL(sampled || policy) of a token, by the estimator k3: what staleness, rounding and the step's "
        "earlier updates have moved. Without meaning for conversations (`sft`), which nothing has sampled.",
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
    LossMetric("critic_error_mean", "reward", "Mean over trained tokens of |value - return|."),
    LossMetric("critic_error_max", "reward", "Largest such difference."),
)
"""What `forward_backward` measures with every loss of a critic."""
Network = Literal["policy", "critic"]
CriticKind = Literal["states", "actions"]
NETWORKS: tuple[Network, ...] = ("policy", "critic")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """The beginning of a policy: which weights it starts with, and which networks stand beside it.

    Attributes:
        model: a name as `PolicyConfig.model` has it, or a folder with weights.
        reference: the model of the reference policy, named like `model`, of which a second copy of weights is kept that
            is never trained; None: there is no reference.
        teacher: the model of the policy that teaches, named like `model`, which is kept like the reference; None: there
            is no teacher.
        critic: a copy of `model` with an optimizer of its own: with one head that values `states`, or with twin heads
            that value `actions` and another copy, which follows it; None: there is no critic. With an adapter, the
            copies are adapters of their own on the same base.
        adapter: what is trained in place of the model's weights, which are then shared with every other network of the
            same model; None: all weights are trained.
        seed: of the initial weights of an adapter.
        vision: what is trained of a model that sees, see `PolicyConfig.vision`.
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
        learning_rate: of this update.
        betas: decay rates of the two moments.
        epsilon: added to the root of the second moment, so that the update is finite.
        weight_decay: decoupled weight decay of parameters with two dimensions or more.
        max_grad_norm: global L2 norm to which the gradient is scaled down before the update.
        target_rate: share by which the copy of a critic of actions moves to the critic after the update.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    target_rate: float = 0.0

    @classmethod
    def of(cls, config: OptimizerConfig, learning_rate: float, target_rate: float | None = None) -> OptimParams:
        """Return the numbers of one update of a job's optimizer.

        Args:
            config: the policy's `[optimizer]`, or the critic's.
            learning_rate: what the schedule says for this step.
            target_rate: of a critic of actions; None: the network has no copy.
        """
        return cls(
            learning_rate=learning_rate,
            betas=config.betas,
            epsilon=config.epsilon,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            target_rate=target_rate or 0.0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The counts and metrics of one `forward_backward`.

    Attributes:
        rows: how many rows the batch had.
        trained_tokens: tokens that entered the loss.
        forward_tokens: tokens that went through the model, after shared prefixes were merged.
        flat_tokens: tokens that would have gone through the model without merging.
        metrics: `TRAINER_METRICS` and the loss's own, by name; NaN where no token counts.
        logprobs: float32 [N] of each row, of its trained tokens, else NaN; None: they were not asked for.
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
        learning_rate: of the update.
        grad_norm: global L2 norm before clipping.
        applied: False: the gradient was not finite, and the weights are as before.
    """

    learning_rate: float
    grad_norm: float
    applied: bool = True


class Trainer(Protocol):
    """Master weights and optimizers of policies, by name.

    A request about one policy leaves every other policy as it is, bit by bit. Requests are handled one after another. A
    repeated `request_id` of a policy gets the first answer and changes nothing, so that a request whose answer was lost
    may be sent again. Every method raises NotFound for a policy that was not created.
    """

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """Load a policy's weights, and give it an optimizer without moments and version 0.0.

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

        Args:
            outputs: the numbers that are wanted; `old_logprobs` are those of the policy's present weights, `values` and
                `next_values` those of a critic of states, `action_values` and `target_action_values` of one of actions.

        Returns:
            For each output one float32 [N] a row, NaN where the token is not trained.

        Raises:
            ConfigError: the trainer can't compute one of the outputs.
        """
        ...

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str, logprobs: bool = False
    ) -> StepReport:
        """Add the gradient of a batch to the gradient that the next `optim_step` applies.

        Args:
            batch: S rows, with advantages and loss weights; for a critic's loss with `values` and `returns`.
            loss: the loss of a token, by its name; a critic's loss adds to the gradient of the critic.
            logprobs: whether the report has those of the trained tokens under the weights that the gradient is of.

        Raises:
            ConfigError: there is no such loss; it is of a critic, and there is none; or it punishes the divergence from
                a reference, and the rows have no `reference_logprobs`.
        """
        ...

    async def optim_step(
        self, policy: str, params: OptimParams, request_id: str, network: Network = "policy"
    ) -> OptimReport:
        """Apply the gradient and clear it. The first update after `weights` makes the version's `n` grow by one.

        Args:
            network: whose gradient; an update of the critic changes no version.

        Raises:
            ConfigError: there is no critic.
        """
        ...

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """Find episodes that can't be trained, because the parts of their record contradict each other.

        The answer depends on the rows alone, so that a repeated step leaves out the same episodes. Faults of the
        trainer itself are raised, here or later. Advantages and loss weights of the rows are not read.

        Returns:
            For each such episode its id and the reason.
        """
        ...

    async def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply that could be sampled under a grammar, token by token, in order of their ids.

        Args:
            grammar: what replies have to match, as in `SamplingParams.grammar`.
            max_tokens: longest reply; a longer one is cut there.
            most: how many replies there may be.

        Raises:
            ConfigError: there are more.
            InvalidRequest, GrammarRefused, EngineFailure: see `Grammars.walk`.
        """
        ...

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Write a checkpoint of a policy and its critic that `load` restores bit by bit; it is whole or not at all.

        Args:
            folder: where the policy's checkpoints are; this one becomes `step-NNNNNN` in it.
            state: JSON to keep beside the weights; `step` (int) numbers the checkpoint.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the disk is full, or can't be written to.
        """
        ...

    async def save_weights(self, policy: str, folder: Path, step: int, request_id: str) -> None:
        """Write a policy's weights alone, whole or not at all, in a folder that a job can have as a `model`.

        Args:
            folder: to write; one that is there is replaced.
            step: after which the policy has these weights.

        Raises:
            CheckpointError: the disk is full, or can't be written to.
        """
        ...

    async def load(self, policy: str, folder: Path, step: int | None = None) -> dict[str, Any] | None:
        """Restore a policy's newest checkpoint whose files are undamaged, or that of one step.

        Args:
            step: number of the checkpoint; None: the newest that is undamaged.

        Returns:
            The `state` that was saved with it; None: there is no checkpoint, and nothing was changed.

        Raises:
            CheckpointError: all are damaged, or that of the step is; or it is of another model.
        """
        ...

    async def remove(self, policy: str) -> None:
        """Forget a policy, its optimizer and its requests, and free the memory."""
        ...

    async def weights(self, policy: str) -> WeightSource:
        """Return the present weights for an engine to read; the next update begins a new version.

        The weights are valid until the policy's next `optim_step`.
        """
        ...

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's master weights."""
        ...

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """Set the incarnation of all later versions of a policy.

        It says that history before the restart may not have been repeated bit by bit.
        """
        ...

    async def close(self) -> None:
        """Finish the present requests, and free all policies."""
        ...
