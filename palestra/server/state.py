"""`DataPlane`: the state that all routes of a data plane share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Scope

from palestra.config import JobConfig
from palestra.errors import (
    Conflict,
    InvalidRequest,
    PalestraError,
    ServerStopping,
    TooManyRequests,
    Unauthorized,
)
from palestra.http.connections import Connections
from palestra.pictures.blobs import Charge
from palestra.server.auth import CALLER, MODEL_ROUTES, Caller, KeyRing
from palestra.server.dialects.others import MAX_NAME, OtherFields
from palestra.server.picture_intake import PictureIntake
from palestra.server.workers import WorkerRegistry
from palestra.session import EpisodeKey, SeatBook, SeatKey, Sessions
from palestra.store import RunStore
from palestra.threads import WorkPool
from palestra.types.gpus import GpuReading
from palestra.types.progress import JobProgress

MAX_IGNORED = 100  # different names of ignored fields that are counted; clients choose the names
EPISODE_BYTES = 2**30  # of pictures that one attempt at an episode adds to the run: a key must not fill the disk


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlane:
    """One job's configuration, store, sessions, keys and progress, and its connected workers."""

    config: JobConfig
    store: RunStore
    sessions: Sessions
    keys: KeyRing
    progress: JobProgress
    started_at: float  # Unix seconds
    gpus: Callable[[], GpuReading] = GpuReading  # what the job's graphics cards do; may block for a second
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    workers: WorkerRegistry = field(init=False)
    pictures: PictureIntake = field(init=False)
    connections: Connections = field(default_factory=Connections)
    ignored: Counter[str] = field(default_factory=Counter)  # calls by the name of a field that had no effect

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", WorkerRegistry(self.store.clock))
        pool = self.sessions.context.picture_pool
        object.__setattr__(self, "pictures", PictureIntake(self.store.pictures, self.config.pictures, pool))
        self.store.episodes.on_lease_over.append(self.workers.mark_lease_over)
        if self.sessions.seats is not None:
            self.sessions.seats.on_seat_over.append(self._seat_over)

    def take_others(self, others: OtherFields) -> None:
        """Count the fields of a call that have no effect. Raises UnsupportedField: a field is unknown, and the job
        refuses unknown fields.
        """
        if self.config.server.unknown_fields == "refuse":
            others.refuse_unknown()
        for name in others.names:
            self.ignored[name if name in self.ignored or len(self.ignored) < MAX_IGNORED else "(others)"] += 1

    def count_refusal(self, scope: Scope, error: PalestraError) -> None:
        """Count a model call of an episode that is refused for what it asks.

        Errors of the present state, such as a lease that is over or too many calls, are no refusals.
        """
        caller = scope.get(CALLER)
        if not isinstance(caller, EpisodeKey | SeatKey) or not scope["path"].startswith(MODEL_ROUTES):
            return
        if 400 <= error.http_status < 500 and not isinstance(error, Conflict | TooManyRequests | Unauthorized):
            field = error.field if isinstance(error, InvalidRequest) else None
            name = error.code if field is None else f"{error.code} {field[:MAX_NAME]}"
            self.store.leases.add_refusal(caller.episode_id, caller.fence, name)

    @property
    def pool(self) -> WorkPool:
        """Return the threads for work that would block the event loop."""
        return self.sessions.context.pool

    @property
    def recent_rewards(self) -> dict[str, float]:
        """Return each policy's mean reward over its last 64 training episodes; of the only trained one as ""."""
        recent, roles = self.store.episodes.recent_rewards, self.sessions.context.policies.roles
        found = {}
        for policy in roles.rivals or ("",):
            own = [roles.of_episode(players).rewards_of(policy, rewards) for rewards, players in recent]
            if rewards := [sum(mine.values()) for mine in own if mine or not roles.rivals]:
                found[policy] = sum(rewards) / len(rewards)
        return found

    def brief_status(self, gpus: GpuReading) -> dict[str, Any]:
        """Return the fields of `BriefJobStatus`."""
        progress, context = self.progress, self.sessions.context
        return {
            "state": progress.state.value,
            "reason": progress.reason,
            "phase": progress.phase,
            "phase_done": None if progress.collected is None else progress.collected.done,
            "phase_due": None if progress.collected is None else progress.collected.due,
            "step": progress.step,
            "seconds_left": progress.seconds_left,
            "tokens_per_second": context.rate.per_second,
            "ignored_fields": dict(self.ignored),
            "workers": self.workers.busy,
            "policies": list(context.policies.names),
            "gpus": list(gpus.cards),
            "gpu_problem": gpus.problem,
        }

    def picture_charge(self, caller: Caller) -> Charge | None:
        """Return what counts the bytes of new pictures of a caller with an episode's key; None: it has another key."""
        if not isinstance(caller, EpisodeKey | SeatKey):
            return None
        return partial(self.store.leases.charge_picture, caller.episode_id, caller.fence, EPISODE_BYTES)

    @property
    def seats(self) -> SeatBook:
        """Return the player slots of the server's episodes. Raises Conflict: the job has none."""
        if self.sessions.seats is None:
            raise Conflict("this job has no seats: its configuration names none in seats.roles; claim without `role`")
        return self.sessions.seats

    def _seat_over(self, lease: str, fence: int, lost: bool) -> None:
        (self.workers.mark_lease_over if lost else self.workers.mark_finished)(lease, fence)

    def stop(self) -> None:
        """Begin the shutdown: every waiting request is told that the server stops and may come back."""
        self.stopping.set()
        self.sessions.stop(ServerStopping("the server is going down; it may come back"))
        self.store.episodes.available.notify()
