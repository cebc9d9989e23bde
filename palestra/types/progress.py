"""The progress of a job: written by the learner, read by `/status`, the terminal and the client."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from palestra.types.records import EpisodeKind
from palestra.types.states import GroupState, JobState, check_transition
from palestra.types.summaries import HealthWarning

ENDLESS = 1_000_000_000  # steps of a job that ends only when it is stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A group in the store: the episodes of one task that are compared with one another.

    Attributes:
        group_index: position in the canonical order of its kind.
        step: train: the step that trains on it; validation: the step before which it is scored.
    """

    kind: EpisodeKind
    group_index: int
    step: int
    task_id: str
    size: int
    state: GroupState


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The number of episodes in each state, for people and for limits."""

    registered: int
    claimed: int
    completed: int
    discarded: int
    unjudged: int = 0  # played, and waiting for a verdict


@dataclass(kw_only=True, slots=True)
class RolloutProgress:
    """The episodes that the server itself plays.

    Attributes:
        terminations: number of ended ones, by `rollout.Termination`.
    """

    playing: int = 0
    terminations: Counter[str] = field(default_factory=Counter)


class Part(StrEnum):
    """The active part of a training job, to find out what blocks the others."""

    LEARNER = "learner"
    TASKS = "tasks"
    TRAINER = "trainer"
    WEIGHT_SYNC = "weight sync"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Phase:
    """The episodes that a phase of the job waits for: those of one kind and step."""

    kind: EpisodeKind
    step: int


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """Progress of a phase that waits for episodes."""

    done: int
    due: int


@dataclass(kw_only=True, slots=True)
class JobProgress:
    """The live state of one job, which is not stored.

    Attributes:
        reason: why it failed or waits; None otherwise.
        part: the active part; see `inside`.
        collecting: episodes that this phase waits for; None: none.
        collected: number of settled ones, about a second old; None without `collecting`.
        step: number of finished steps.
        sampled_tokens: sampled by the trained policy for these steps.
        token_budget: number of sampled tokens that ends training; None: only `steps` ends it.
        version: of the policy, as "incarnation.n".
        last_metrics: the last step's row.
        episodes: number by state, about a second old; None until the job is watched.
        staleness: trained tokens of the last step, by their age in versions.
        warnings: present ones, after the last step.
        runners: number of the job's own runner processes.
        step_seconds: durations of this process's steps, without evaluations.
        step_began: monotonic seconds; None: no step has begun.
    """

    job: str
    steps: int
    run_dir: str
    state: JobState = JobState.STARTING
    reason: str | None = None
    phase: str = "starting"
    part: Part = Part.LEARNER
    collecting: Phase | None = None
    collected: PhaseProgress | None = None
    step: int = 0
    sampled_tokens: int = 0
    token_budget: int | None = None
    version: str = "0.0"
    last_metrics: dict[str, float] = field(default_factory=dict)
    episodes: Counts | None = None
    staleness: dict[int, int] = field(default_factory=dict)
    warnings: list[HealthWarning] = field(default_factory=list)
    rollouts: RolloutProgress = field(default_factory=RolloutProgress)
    runners: int = 0
    step_seconds: list[float] = field(default_factory=list)
    step_began: float | None = None
    evaluation_seconds: list[float] = field(default_factory=list)
    evaluations_left: int = 0
    numerics: dict[str, str] = field(default_factory=dict)

    def enter(self, phase: str, collecting: Phase | None = None) -> None:
        """Begin a phase. `collecting` has the episodes that the phase waits for, if any."""
        self.phase, self.collecting, self.collected = phase, collecting, None

    @contextmanager
    def inside(self, part: Part) -> Iterator[None]:
        """Mark a part of the job as active while the block runs."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def move(self, following: JobState, reason: str | None = None) -> None:
        """Change the job's state, with a reason for people."""
        check_transition(f"job {self.job}", self.state, following)
        self.state, self.reason = following, reason

    @property
    def over(self) -> bool:
        """Return whether the job has ended for good."""
        return self.state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated time of the remaining steps and evaluations; None before two are over, or without end.

        With a token budget, the remaining steps are those that sample the rest of it.
        """
        if len(self.step_seconds) < 2 or self.steps >= ENDLESS:
            return None
        # The first step warms up, and later ones become slower or faster as replies grow or shrink.
        a_step = fmean(self.step_seconds[1:][-10:])
        steps = float(self.steps - self.step)
        if self.token_budget is not None and self.step and self.sampled_tokens:
            left = max(self.token_budget - self.sampled_tokens, 0)
            steps = min(steps, left / (self.sampled_tokens / self.step))
        done = 0.0 if self.step_began is None else min(time.monotonic() - self.step_began, a_step)
        evaluations = self.evaluations_left * fmean(self.evaluation_seconds[-10:] or [0.0])
        return max(steps * a_step - done, 0.0) + evaluations


def of_steps(step: int, steps: int, width: int = 0) -> str:
    """Return `3/30`, or `3` for a job without an end."""
    return f"{step:>{width}}/{steps}" if steps < ENDLESS else str(step)


def short_number(value: float | None) -> str:
    """Return a number with three digits: `0.0333`, `1.5`, `1,350`; from a million `1.35e+06`; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a rounded duration, such as `8 s`, `3 min` or `2.5 h`."""
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def exact_duration(seconds: float) -> str:
    """Return an exact duration, such as `45 s`, `1 h 30 min` or `0.5 s`."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    parts = [f"{number} {unit}" for number, unit in ((hours, "h"), (minutes, "min")) if number]
    return " ".join([*parts, f"{rest:g} s"] if rest or not parts else parts)
