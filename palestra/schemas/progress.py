"""Where a job stands: written by the learner, read by `/status`, the terminal and the client."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from palestra.schemas.protocols import Counts
from palestra.schemas.records import EpisodeKind
from palestra.schemas.states import JobState, check_transition


@dataclass(kw_only=True, slots=True)
class RolloutProgress:
    """The episodes that this process plays itself."""

    playing: int = 0
    terminations: Counter[str] = field(default_factory=Counter)  # why they ended


@dataclass(frozen=True, slots=True)
class Collecting:
    """The episodes that a phase waits for: those of one kind and step."""

    kind: EpisodeKind
    step: int


@dataclass(frozen=True, slots=True)
class Collected:
    """How far that is."""

    done: int  # completed or discarded
    due: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthWarning:
    """A sign that a run learns nothing, although its steps succeed."""

    code: str  # stable, for programs: `no_calls`, `equal_rewards`, …
    step: int  # the newest step that shows it
    text: str  # what it means and what to do, in one line


@dataclass(kw_only=True, slots=True)
class JobProgress:
    """The live state of one job."""

    job: str
    steps: int
    run_dir: str
    state: JobState = JobState.STARTING
    reason: str | None = None
    phase: str = "starting"  # what it is doing, for people; see `enter`
    collecting: Collecting | None = None  # the episodes that this phase waits for; None: it waits for none
    collected: Collected | None = None  # how far that is, about a second old; None where `collecting` is
    step: int = 0  # steps that are done
    version: str = "0.0"
    last_metrics: dict[str, float] = field(default_factory=dict)
    episodes: Counts | None = None  # about a second old; None until the job is watched
    staleness: dict[int, int] = field(default_factory=dict)  # trained tokens of the last step, by age in versions
    warnings: list[HealthWarning] = field(default_factory=list)  # that hold after the last step
    rollouts: RolloutProgress = field(default_factory=RolloutProgress)
    step_seconds: list[float] = field(default_factory=list)  # the last few, evaluation included

    def enter(self, phase: str, collecting: Collecting | None = None) -> None:
        """Begin a phase, which waits for the episodes of `collecting`, if for any."""
        self.phase, self.collecting, self.collected = phase, collecting, None

    def move(self, following: JobState, reason: str | None = None) -> None:
        """Change the state.

        Raises:
            IllegalTransition: the lifecycle does not allow it.
        """
        check_transition(f"job {self.job}", self.state, following)
        self.state, self.reason = following, reason

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)

    @property
    def seconds_left(self) -> float | None:
        """Steps left times the mean of the last steps; None until two are done."""
        if len(self.step_seconds) < 2:
            return None
        recent = self.step_seconds[-10:]
        return (self.steps - self.step) * sum(recent) / len(recent)


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
