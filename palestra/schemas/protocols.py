"""Records of groups and of episode counts, which the store returns and the learner and limits read."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.schemas.records import EpisodeKind
from palestra.schemas.states import GroupState


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A group as the store keeps it: the episodes of one task that are compared with one another.

    Attributes:
        kind: of its episodes.
        group_index: position in the canonical order of its kind.
        step: train: the step that trains it; validation: the step before which it is scored.
        task_id: of its task.
        size: how many episodes it has.
        state: of its lifecycle.
    """

    kind: EpisodeKind
    group_index: int
    step: int
    task_id: str
    size: int
    state: GroupState


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The number of episodes in each state, for people and for limits."""

    registered: int
    claimed: int
    completed: int
    discarded: int
