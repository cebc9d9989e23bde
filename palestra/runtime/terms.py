"""`JobTerms`: how a job is started, beside its configuration."""

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
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        scored: tasks to score the models on, once each, without training. None: the job does what its configuration
            says.
        own_code: whether `algorithm.name` may be a class of the user's own; never true in a server.
        given: splits whose tasks are pushed to the job, so that its environment makes none; see `load_tasks`.
        places: where its processes run beside this one.
        most_replicas: inference workers that those who have the job's key may ask for; None: any number.
    """

    weights: Mapping[str, str] = field(default_factory=dict)
    scored: Sequence[Task] | None = None
    own_code: bool = False
    given: Collection[Split] = ()
    places: JobPlaces = HERE
    most_replicas: int | None = None


USUAL = JobTerms()
