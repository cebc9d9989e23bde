"""Base servers that a service starts for jobs with `base = "shared"`: what they are, and how busy they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from palestra.types.jobs import Resources
from palestra.types.states import BaseState


class BaseKind(NamedTuple):
    """What jobs need of a base server: those of one kind may share one.

    Attributes:
        model: the base, as the jobs name it.
        deterministic: whether its samples and weights have the same bits with any other work beside them.
    """

    model: str
    deterministic: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLoad:
    """How busy a base server is, as it says itself.

    Attributes:
        waiting: requests in the queue of its trainer, those that are being computed included.
        longest_wait: seconds since the oldest of them came; 0.0: there is none.
        policies: of all jobs that are connected.
        tokens: that the trainer has computed for the jobs that are there, each other request counted as some.
    """

    waiting: int = 0
    longest_wait: float = 0.0
    policies: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRecord:
    """A base server, as the control store keeps it until it has ended.

    Attributes:
        base_id: unique in the control store.
        kind: its model, and whether it is deterministic.
        state: of its lifecycle; see `states.TRANSITIONS`.
        reason: of the newest change of state.
        node: where it runs.
        resources: what it holds there.
        address: that jobs connect to, which stays when the server is started again; None before the first start.
        created_at: Unix seconds.
        changed_at: Unix seconds of the newest change of state.
        starts: how often it became LOADING.
    """

    base_id: str
    kind: BaseKind
    state: BaseState
    reason: str
    node: str
    resources: Resources
    address: str | None
    created_at: float
    changed_at: float
    starts: int
