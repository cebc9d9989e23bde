"""The `[watchdog]` table: when a training job without progress is stopped."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from palestra.config.section import Section


class WatchdogConfig(Section):
    """Ends a training job without progress, and names the stuck part."""

    seconds: float = Field(
        3600.0,
        ge=0,
        description="Time without an accepted token and without a finished step after which the job fails; 0: never. A "
        "step has to be shorter.",
    )
    idle: Literal["wait", "fail"] = Field(
        "wait",
        description="Whether time in which no worker plays counts, while the job itself is in order. `wait`: it does "
        "not, so that workers may come and go; `fail`: as any other time.",
    )
