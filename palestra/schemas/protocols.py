"""What the rooms ask of one another: Engine, Trainer, EpisodeStore."""

from __future__ import annotations

from asyncio import Future
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palestra.schemas.records import (
    BatchManifest,
    Chat,
    Claim,
    Episode,
    EpisodeKind,
    Event,
    Floats,
    Ids,
    PolicyVersion,
    SampledTokens,
    Sampling,
    StepTimes,
    Task,
    TrainSample,
    Trajectory,
)
from palestra.schemas.states import GroupState


class Engine(Protocol):
    """Samples tokens from the published versions of the policies."""

    def generate(self, policy: str, prompt_ids: Ids, sampling: Sampling) -> AsyncIterator[SampledTokens]:
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


class EpisodeStore(Protocol):
    """The run store: one lifecycle, one grouping, one exactly-once rule for all workers.

    A method that changes something returns when the change is committed.
    """

    async def push_tasks(self, split: str, tasks: Sequence[Task], chunk_id: str) -> int:
        """Add tasks; the same chunk again is a no-op. Returns how many tasks the split has now."""
        ...

    async def seal_tasks(self) -> None:
        """No more tasks will come."""
        ...

    async def register_group(self, kind: EpisodeKind, group_index: int, step: int, task: Task, size: int) -> None:
        """Register a group's episodes; the same group again is a no-op."""
        ...

    async def claim(
        self, worker_id: str, request_id: str, lease_seconds: float | None, episode_id: str | None = None
    ) -> Claim | None:
        """Hand out the next registered episode, or the one named. None: there is none now."""
        ...

    async def end(
        self,
        episode_id: str,
        fence: int,
        rewards: Mapping[str, float],
        step_rewards: Sequence[float] | None,
        metadata: Mapping[str, Any],
        step_times: Sequence[StepTimes] | None = None,
    ) -> bool:
        """Complete an episode. True: now; False: it was, with the same body.

        Raises:
            Conflict: fenced off, discarded, or ended before with another body.
        """
        ...

    async def abort(self, episode_id: str, fence: int, reason: str, discard: bool, counts: bool = True) -> None:
        """Give an episode back (or discard it); what it sampled is not trained on.

        `counts`: whether the attempt is one of the `max_attempts`; not where it was the server's fault.
        """
        ...

    def append_chat(self, chat: Chat) -> Future[None]:
        """Record a call; the future is done when it is on disk, also where nobody waits for it any more.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the lease under which it was made is over.
        """
        ...

    async def chats(self, episode_id: str, fence: int) -> tuple[Chat, ...]:
        """The calls recorded under one lease."""
        ...

    async def episode(self, episode_id: str) -> Episode:
        """One episode.

        Raises:
            NotFound: no such episode.
        """
        ...

    async def trajectories(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        """Completed episodes with their calls, in the order asked for."""
        ...

    async def commit_manifest(self, manifest: BatchManifest) -> None:
        """Fix what a step trains on."""
        ...

    async def add_event(self, kind: str, data: Mapping[str, Any]) -> Event:
        """Record that something happened."""
        ...
