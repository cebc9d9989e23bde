"""What the rooms ask of one another: Engine, and what the store tells of groups and counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from palestra.schemas.records import (
    EpisodeKind,
    Ids,
    PolicyVersion,
    SampledTokens,
    SamplingParams,
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
