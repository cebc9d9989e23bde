"""What engines have in common that may be several inference workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from palestra.config.section import Section


class PooledEngineConfig(Section):
    """Keys of engines that may be several inference workers, each a process of its own."""

    replicas: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Inference workers, each a process with the models, or servers of its own; 1: there is one engine, "
        "and no pool.",
    )
    sync: Literal["rolling", "all"] = Field(
        "rolling",
        description="How new weights reach several workers. `rolling`: one after another, so that the others go on; "
        "`all`: all together.",
    )
    stuck_seconds: float = Field(
        60.0, gt=0, description="One of several workers that has work, and does none for so long, is replaced."
    )

    @property
    def workers(self) -> int:
        """Return how many inference workers a job begins with."""
        return self.replicas
