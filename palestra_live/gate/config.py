"""`[live.gate]`: what a new version has to show before it serves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from palestra.config import JudgeConfig
from palestra.config.section import Positive, Section
from palestra_live.gate.statistics import pairs_needed

Share = Annotated[float, Field(gt=0.0, le=0.5)]
EQUAL_SPREAD = 0.71  # largest standard deviation of the difference between two equal versions with scores of 0 and 1


class Guardrails(Section):
    """What a version may do worse than the live one, whatever its scores are."""

    latency: float = Field(1.5, gt=1.0, le=100.0, description="Seconds of a call, as a multiple.")
    length: float = Field(
        1.5, gt=1.0, le=100.0, description="Tokens of a reply, as a multiple; recorded sessions only."
    )
    cost: float = Field(
        1.5, gt=1.0, le=100.0, description="Money of a call by `prices`, as a multiple; recorded sessions only."
    )
    refusals: float = Field(
        0.05,
        gt=0.0,
        lt=1.0,
        description="Share of recorded sessions with a reply that refuses to help, as a difference from the live "
        'version. Only English is known: "I can\'t help with that" is a refusal, and an apology is none.',
    )
    errors: float = Field(0.02, gt=0.0, lt=1.0, description="Share of sessions with an error, as a difference.")


class GateConfig(Section):
    """Bounds of the gate. Scores lie between 0 and 1, and so do their differences."""

    margin: float = Field(
        0.0, ge=0.0, lt=1.0, description="A version is promoted when its score is shown to be higher by more than this."
    )
    canary: Share = Field(0.05, description="Share of the users whose sessions a canary serves.")
    drop: Share = Field(
        0.05,
        description="After a promotion, a mean score this much below that of the version before is a loss. With a "
        "[judge] a version first answers logged prompts in the shadow, judged against the live one. The shadow then "
        "has to show the margin, and the canary only that the score of sessions falls by less than twice `drop`.",
    )
    pairs: Positive = Field(5_000, le=10_000_000, description="Pairs after which an undecided version is rejected.")
    guardrails: Guardrails = Guardrails()


class GateBounds(GateConfig):
    """The bounds of a gate, and whether versions are compared in the shadow first."""

    shadow: bool = False

    @property
    def worse(self) -> float:
        """Return the loss of score that a canary after a shadow has to rule out."""
        return 2 * self.drop

    @model_validator(mode="after")
    def _can_be_shown(self) -> GateBounds:
        if self.shadow and (most := pairs_needed(self.worse, EQUAL_SPREAD)) > self.pairs:
            raise ValueError(
                f"a loss of 2 x drop = {self.worse:g} takes up to {most:,} pairs to show, or "
                f"{most / self.canary:,.0f} sessions with a canary of {self.canary:.0%}, and a comparison ends "
                f"after {self.pairs:,} pairs: raise drop or pairs"
            )
        return self


def bounds_of(gate: GateConfig, judge: JudgeConfig | None) -> GateBounds:
    """Return the bounds of a gate; with a judge, versions are compared in the shadow first. Raises ConfigError: they
    can't be shown.
    """
    return GateBounds(**gate.model_dump(), shadow=judge is not None)


def why_unreachable(config: GateConfig, level: float) -> str | None:
    """Return why no version can show the margin over a live version with this mean score; None: one can."""
    gap = 1.0 - level - config.margin
    if gap <= 0.0:
        return f"no version can be better than the live one by {config.margin:g}: its mean score is {level:.3f}"
    needed = pairs_needed(gap, (level * (1.0 - level)) ** 0.5)
    if needed <= config.pairs:
        return None
    return (
        f"a version that always scores 1 shows the margin of {config.margin:g} over a mean of {level:.3f} only "
        f"after about {needed:,} pairs ({needed / config.canary:,.0f} sessions), and a comparison ends after "
        f"{config.pairs:,}: lower the margin or raise live.gate.pairs"
    )
