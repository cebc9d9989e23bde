"""How a job is started, apart from its configuration: its terms, and where its processes run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp

from palestra.client.task_files import TaskFile
from palestra.learner.gathering import EpisodeSource
from palestra.learner.samplers import SamplerMaker
from palestra.process.child import ProcessStarter
from palestra.store.ledger import Allowance
from palestra.types.records import Task

if TYPE_CHECKING:
    from palestra.http.app import GuardedApp
    from palestra.learner import OpenRun
    from palestra.runtime.parts import Parts
    from palestra.server import DataPlane


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlaces:
    """Starts the processes of a job.

    Attributes:
        runner: starts a runner in its own bundle; None: runners share this machine with the job.
        engine: starts an inference worker in its own bundle; None: workers share this machine with the job.
        trainer: starts a rank in its own bundle; None: ranks share this machine with the job.
        rank_memory_gib: memory of a rank's bundle; None: unknown or no bundle.
        folder: shared folder for weights that travel between machines; None: there is only this machine.
    """

    runner: ProcessStarter | None = None
    engine: ProcessStarter | None = None
    trainer: ProcessStarter | None = None
    rank_memory_gib: float | None = None
    folder: Path | None = None


HERE = JobPlaces()
"""All processes are on this machine."""


class JobExtension(EpisodeSource, Protocol):
    """Adds routes to a job's data plane, and gives its training episodes in place of tasks that are played.

    Attributes:
        app: is served in place of the job's own application, which it wraps.
    """

    app: ASGIApp


ExtensionMaker = Callable[["OpenRun", "DataPlane", "GuardedApp"], AbstractAsyncContextManager[JobExtension]]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTerms:
    """How a job is started.

    Attributes:
        weights: folders that replace the policies' `model`, by policy.
        scored: tasks to score the models on, once each, without training. None: the job follows its configuration.
        own_code: whether `algorithm.name` may be a user's class; never true in a server.
        plays: whether the job plays what its configuration names; False: the caller plays.
        tasks: of a script, by split; see `load_tasks`.
        parts: the engine, trainer and policies; None: as configured.
        places: where its other processes run.
        sampler: a user's own choice of the training tasks; None: as configured.
        allowed: returns, in any thread, what the job may spend of a budget that it shares; None: it shares none.
        extension: makes the `JobExtension` of a kind of run that a package brings; None: an ordinary job.
        source: gives the training episodes; None: tasks are played.
        most_replicas: limit of inference workers that holders of the job's key may request; None: any number.
    """

    weights: Mapping[str, str] = field(default_factory=dict)
    scored: Sequence[Task] | None = None
    own_code: bool = False
    plays: bool = True
    tasks: Mapping[str, TaskFile] = field(default_factory=dict)
    parts: Parts | None = None
    places: JobPlaces = HERE
    sampler: SamplerMaker | None = None
    extension: ExtensionMaker | None = None
    source: EpisodeSource | None = None
    most_replicas: int | None = None
    allowed: Callable[[], Allowance] | None = None


USUAL = JobTerms()
