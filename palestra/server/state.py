"""`DataPlane`: the state that all routes of a data plane share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from palestra.config import JobConfig
from palestra.errors import ServerStopping
from palestra.http.connections import Connections
from palestra.server.auth import KeyRing
from palestra.server.workers import WorkerRegistry
from palestra.session import Sessions
from palestra.store import RunStore
from palestra.threads import WorkPool
from palestra.types.progress import JobProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlane:
    """One job's configuration, store, sessions, keys and progress, and its connected workers."""

    config: JobConfig
    store: RunStore
    sessions: Sessions
    keys: KeyRing
    progress: JobProgress
    started_at: float  # Unix seconds
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    workers: WorkerRegistry = field(init=False)
    connections: Connections = field(default_factory=Connections)

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", WorkerRegistry(self.store.clock))
        self.store.episodes.on_lease_over.append(self.workers.mark_lease_over)

    @property
    def pool(self) -> WorkPool:
        """Return the threads for work that would block the event loop."""
        return self.sessions.context.pool

    @property
    def recent_reward(self) -> float | None:
        """Mean reward of the last 64 training episodes, without that of frozen policies; None before the first."""
        recent, roles = self.store.episodes.recent_rewards, self.sessions.context.policies.roles
        learned = [roles.of_episode(players).trained_rewards(rewards).values() for rewards, players in recent]
        return sum(map(sum, learned)) / len(learned) if learned else None

    def stop(self) -> None:
        """Begin the shutdown: every waiting request is answered that the server stops and may come back."""
        self.stopping.set()
        self.sessions.stop(ServerStopping("the server is going down; it may come back"))
        self.store.episodes.available.notify()
