"""Keys that several kinds of engines have."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from palestra.config.section import Section

InFlightUpdates = Annotated[
    Literal["continue", "finish"],
    Field(
        description="How to treat replies that are being sampled when new weights arrive. `continue`: under the new "
        "weights (each token records its version); `finish`: the weights wait until the replies are complete, except "
        "that a reply whose worker has died is sampled again under the weights of then, and may keep tokens that were "
        "passed on before."
    ),
]


Sync = Annotated[
    Literal["rolling", "all"],
    Field(
        description="How new weights reach several workers. `rolling`: one after another, while the others keep "
        "sampling; `all`: all together."
    ),
]
StuckSeconds = Annotated[
    float,
    Field(
        ge=0.1,
        le=86_400,
        description="With several workers, and with servers of vLLM or SGLang: seconds after which a worker that has "
        "requests and makes no progress is replaced.",
    ),
]


class PooledEngineConfig(Section):
    """Keys of engines that may be several inference workers, each a process of its own."""

    replicas: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Number of inference workers. Each is a process with a copy of the models, or a group of servers, "
        "one for each policy; 1: an embedded engine is in the job's own process.",
    )
    sync: Sync = "rolling"
    stuck_seconds: StuckSeconds = 60.0

    @property
    def pooled(self) -> bool:
        """Return whether the engine is a pool of inference workers, and not in the job's own process."""
        return self.worker_count > 1

    @property
    def worker_count(self) -> int:
        """Return how many inference workers a job begins with."""
        return self.replicas

    @property
    def started_count(self) -> int:
        """Return how many of its inference workers a job starts; the others are servers that run already."""
        return self.worker_count

    @property
    def tables(self) -> tuple[Self, ...]:
        """Return the tables of the workers, one for each kind of them."""
        return (self,)
