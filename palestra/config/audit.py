"""The `[audit]` table: what watches whether the reward of a job is gamed."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from palestra.config.judge import JudgeConfig
from palestra.config.section import Section


class AuditConfig(Section):
    """Looks at each step for signs that the reward is gamed; see docs/how-to/audits.md."""

    model_config = ConfigDict(defer_build=True)  # see `JudgeConfig`

    judge: JudgeConfig | None = Field(
        None,
        description="A second judge, whose scores are never a reward: a table with the keys of `[judge]`. None: no "
        "episode is scored again, and only the other signs are looked for.",
    )
    episodes: int = Field(
        32,
        ge=4,
        le=4096,
        description="Episodes of a step that `judge` scores: half of them are drawn, the others have the highest "
        "rewards of the rest.",
    )
    action: Literal["warn", "hold", "pause"] = Field(
        "warn",
        description="What follows if rewards and audit diverge. `warn`: a warning; `hold`: the new versions play the "
        "job's own episodes only; `pause`: the job ends before the new version is published.",
    )

    @model_validator(mode="after")
    def _can_hold(self) -> AuditConfig:
        if self.action != "warn" and self.judge is None:
            raise ValueError(f"action = {self.action!r} needs the scores of a second judge: add [audit.judge]")
        return self

    @model_validator(mode="after")
    def _has_scores_with_bounds(self) -> AuditConfig:
        if self.judge is not None and not self.judge.bounded:
            raise ValueError(f"an audit needs scores from 0 to 1, and a judge of kind {self.judge.kind!r} gives others")
        return self
