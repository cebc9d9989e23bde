"""Base servers that a service starts for jobs with `base = "shared"`, and their load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from palestra.types.jobs import Resources
from palestra.types.states import BaseState


class BaseKind(NamedTuple):
    """What jobs need from a base server; jobs with equal kinds may share one.

    Attributes:
        deterministic: whether its samples and weights have the same bits whatever else it computes.
    """

    model: str
    deterministic: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLoad:
    """The load of a base server, as it reports it.

    Attributes:
        waiting: training requests in its queue, including running ones.
        longest_wait: seconds since the oldest arrived; 0.0: none waits.
        tokens: computed by the trainer for present jobs; each request without tokens counts a fixed number.
    """

    waiting: int = 0
    longest_wait: float = 0.0
    policies: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRecord:
    """A base server in the control store.

    Attributes:
        reason: of the newest state change.
        address: for jobs; kept across restarts. None before the first start.
        created_at: Unix seconds.
        changed_at: Unix seconds of the newest state change.
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
