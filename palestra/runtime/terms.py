"""`JobTerms`: how a job is started, apart from its configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.envs.task_splits import Split
from palestra.runtime.places import HERE, JobPlaces
from palestra.types.records import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTerms:
    """How a job is started.

    Attributes:
        weights: folders that replace the policies' `model`, by policy.
        scored: tasks to score the models on, once each, without training. None: the job follows its configuration.
        own_code: whether `algorithm.name` may be a user's class; never true in a server.
        given: splits whose tasks are pushed to the job, so that its environment generates none; see `load_tasks`.
        places: where its other processes run.
        most_replicas: limit of inference workers that holders of the job's key may request; None: any number.
    """

    weights: Mapping[str, str] = field(default_factory=dict)
    scored: Sequence[Task] | None = None
    own_code: bool = False
    given: Collection[Split] = ()
    places: JobPlaces = HERE
    most_replicas: int | None = None


USUAL = JobTerms()
