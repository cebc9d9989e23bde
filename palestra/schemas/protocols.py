"""What the rooms ask of one another: Engine, Trainer, and what the store tells of groups and counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palestra.schemas.records import (
    EpisodeKind,
    Floats,
    Ids,
    PolicyVersion,
    SampledTokens,
    SamplingParams,
    TrainSample,
)
from palestra.schemas.states import GroupState


class Engine(Protocol):
    """Samples tokens from the published versions of the policies."""

    def generate(self, policy: str, prompt_ids: Ids, sampling: SamplingParams) -> AsyncIterator[SampledTokens]:
        """Stream a reply; closing the iterator cancels the call. Ends with a stop token or at `max_tokens`.

        Raises:
            EngineFailure: the call could not be finished; nothing of it may be used.
        """
        ...

    async def update_weights(self, policy: str, version: PolicyVersion, weights: Any) -> None:
        """Replace a policy's weights, between two forward passes; caches of the older version are dropped."""
        ...

    async def pause(self) -> None:
        """Return when no forward pass runs; none starts until `resume`."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    def version(self, policy: str) -> PolicyVersion:
        """The version that a call starting now is sampled from."""
        ...

    async def close(self) -> None:
        """Stop; calls in flight fail with EngineFailure."""
        ...

    async def failure(self) -> str:
        """Return when the engine as a whole can't go on, and say why; one that was closed never does."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one `forward_backward` saw. Means are over trained tokens.

    `clipped_on_policy` among the metrics is over those that the trainer's present version sampled; NaN where none are.
    """

    rows: int
    trained_tokens: int
    forward_tokens: int  # tokens that went through the model, after shared prefixes were merged
    flat_tokens: int  # the same without merging
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimReport:
    """What one `optim_step` did."""

    learning_rate: float
    grad_norm: float  # before clipping
    applied: bool = True  # False: the gradient was not finite; the weights are as before


class Trainer(Protocol):
    """Holds master weights and optimizers. A repeated `request_id` gets the first answer and does nothing."""

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: Callable[..., Any], request_id: str
    ) -> StepReport:
        """Add the batch's gradient. `loss` is an algorithm's pure function on tensors."""
        ...

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """Return why episodes can't be trained, by id: what was recorded of them does not fit together.

        The answer depends on the rows alone, so that a step that is repeated leaves out the same episodes. What is
        wrong with the trainer itself is raised, here or later.
        """
        ...

    async def logprobs(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> list[Floats]:
        """[N] for each row, without a gradient: of the tokens that are trained, NaN elsewhere."""
        ...

    async def optim_step(self, policy: str, learning_rate: float, request_id: str) -> OptimReport:
        """Apply the gradient and clear it; the first update since a publication makes the version's `n` grow by one."""
        ...

    async def save(self, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Write a checkpoint that `load` gives back bit by bit, whole or not at all; returns its folder."""
        ...

    async def load(self, folder: Path) -> dict[str, Any] | None:
        """Read the newest good checkpoint in `folder`; returns the `state` saved with it, None if there is none."""
        ...

    async def publish(self, policy: str, engine: Engine, request_id: str) -> PolicyVersion:
        """Hand the present weights to an engine."""
        ...

    def version(self, policy: str) -> PolicyVersion:
        """The version of the master weights."""
        ...

    def begin_incarnation(self, incarnation: int) -> None:
        """What was done before this restart can't be repeated bit by bit: versions from here on say so."""
        ...

    async def close(self) -> None:
        """Stop the trainer's thread."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A group as the store has it."""

    kind: EpisodeKind
    group_index: int
    step: int  # train: the step it is for; validation: the step before which it is scored
    task_id: str
    size: int
    state: GroupState


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How many episodes are in each state, for people and limits."""

    registered: int
    claimed: int
    completed: int
    discarded: int
