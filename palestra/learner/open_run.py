"""`OpenRun`: the shared dependencies of a job's run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from palestra.config import JobConfig
from palestra.engine.base import Engine, WorkerPool
from palestra.session import PolicySet
from palestra.store import RunStore
from palestra.store.spending import Metering
from palestra.trainer.base import Trainer
from palestra.types.progress import JobProgress

if TYPE_CHECKING:
    from palestra.learner.reporting import RunFolder

Report = Callable[[str, dict[str, Any]], None]
AddEvent = Callable[[str, dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """The run of a job, open in this process.

    Attributes:
        engine: samples the episodes, and receives new weights.
        progress: the state that `/status` shows.
        report: is called with every event, as it is recorded.
        workers: the engine, if it is a pool of inference workers.
        resumed: whether workers of an earlier process may come back.
        sampling: set when the engine answers calls.
        trainer: None: nothing is trained.
        metering: counts what the job spends; None: it has neither prices nor a budget.
    """

    config: JobConfig
    store: RunStore
    engine: Engine
    policies: PolicySet
    folder: RunFolder
    progress: JobProgress
    report: Report
    workers: WorkerPool | None = None
    resumed: bool = False
    trainer: Trainer | None = None
    sampling: asyncio.Event = field(default_factory=asyncio.Event)
    metering: Metering | None = None

    async def event(self, kind: str, data: dict[str, Any]) -> None:
        """Record an event, and report it."""
        await self.store.log.add_event(kind, data)
        self.report(kind, data)
