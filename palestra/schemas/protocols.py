"""What the store tells of groups and counts."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.schemas.records import EpisodeKind
from palestra.schemas.states import GroupState


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
