"""Where a job stands: written by the learner, read by `/status`, the terminal and the client."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A group as the store keeps it: the episodes of one task that are compared with one another.

    Attributes:
        kind: of its episodes.
        group_index: position in the canonical order of its kind.
        step: train: the step that trains it; validation: the step before which it is scored.
        task_id: of its task.
        size: how many episodes it has.
        state: of its lifecycle.
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


@dataclass(kw_only=True, slots=True)
class RolloutProgress:
    """The episodes that the server itself plays.

    Attributes:
        playing: how many are being played now.
        terminations: how many have ended, by `rollout.Termination`.
    """

    playing: int = 0
    terminations: Counter[str] = field(default_factory=Counter)


class Part(StrEnum):
    """The part of a training job that is at work, for whoever wants to know what holds up the others."""

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
    """Progress of a phase that waits for episodes.

    Attributes:
        done: episodes that are completed or discarded.
        due: all episodes that the phase waits for.
    """

    done: int
    due: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthWarning:
    """A sign that a run learns nothing, although its steps succeed.

    Attributes:
        code: stable name for programs: `no_calls`, `equal_rewards`, …
        step: newest step that shows the sign.
        text: meaning and remedy, in one line.
        policy: that shows it; empty: the only one that is trained, or the whole job.
    """

    code: str
    step: int
    text: str
    policy: str = ""


@dataclass(kw_only=True, slots=True)
class JobProgress:
    """The live state of one job, which is not stored.

    Attributes:
        job: name of the run.
        steps: how many steps the job has in all.
        run_dir: its folder.
        state: of its lifecycle.
        reason: why it failed or waits; None otherwise.
        phase: what the job is doing, for people; see `enter`.
        part: of the job that is at work; see `inside`.
        collecting: episodes for which this phase waits; None: it waits for none.
        collected: how many of these are settled, about a second old; None where `collecting` is.
        step: how many steps are finished.
        sampled_tokens: tokens that the trained policy has sampled for these steps.
        token_budget: sampled tokens with which training ends; None: it ends with `steps` only.
        version: of the policy, as "incarnation.n".
        last_metrics: the row of the last step.
        episodes: how many there are by state, about a second old; None until the job is watched.
        staleness: trained tokens of the last step, by their age in versions.
        warnings: those that hold after the last step.
        rollouts: the episodes that the server itself plays.
        runners: how many processes of the job's own play its environment now.
        step_seconds: how long the steps of this process took, without evaluations.
        step_began: monotonic seconds at which the present step began; None: none has.
        evaluation_seconds: how long evaluations took.
        evaluations_left: number of evaluations that are still to be made.
        numerics: what computes it; see `palestra.models.numerics`.
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
        """Begin a phase.

        Args:
            phase: what the job is doing, for people.
            collecting: the episodes for which the phase waits, if for any.
        """
        self.phase, self.collecting, self.collected = phase, collecting, None

    @contextmanager
    def inside(self, part: Part) -> Iterator[None]:
        """Say that a part of the job is at work while the block runs."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def move(self, following: JobState, reason: str | None = None) -> None:
        """Change the state of the job, with the reason for people.

        Raises:
            IllegalTransition: the lifecycle does not allow the change.
        """
        check_transition(f"job {self.job}", self.state, following)
        self.state, self.reason = following, reason

    @property
    def over(self) -> bool:
        """Return whether the job has ended, so that its state never changes again."""
        return self.state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)

    @property
    def seconds_left(self) -> float | None:
        """Return the time of the remaining steps and evaluations; None until two steps are finished.

        With a token budget, the remaining steps are those that sample the rest of it.
        """
        if len(self.step_seconds) < 2:
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


def duration(seconds: float) -> str:
    """Return a time span in words, such as `8 s`, `3 min` or `2.5 h`."""
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def exact_duration(seconds: float) -> str:
    """Return a time span in words without rounding it, such as `45 s`, `1 h 30 min` or `0.5 s`."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    parts = [f"{number} {unit}" for number, unit in ((hours, "h"), (minutes, "min")) if number]
    return " ".join([*parts, f"{rest:g} s"] if rest or not parts else parts)
