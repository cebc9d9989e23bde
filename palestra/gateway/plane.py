"""What the routes of a data plane work on."""

from __future__ import annotations

from dataclasses import dataclass, field

from palestra.config import JobConfig
from palestra.gateway.keys import KeyRing
from palestra.ledger import RunStore
from palestra.schemas.progress import JobProgress
from palestra.session import Sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlane:
    """One job's store, sessions, keys and progress."""

    config: JobConfig
    store: RunStore
    sessions: Sessions
    keys: KeyRing
    progress: JobProgress
    started_at: float  # Unix seconds
    told: set[str] = field(default_factory=set)  # workers that know that the job is over
    workers: dict[str, float] = field(default_factory=dict)  # monotonic time of each worker's last claim
