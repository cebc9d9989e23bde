"""The definition of a rule: a sign in the rows of a run's metrics, its meaning, and a remedy."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from palestra.config import JobConfig
from palestra.types.summaries import EpisodeSummary

Row = Mapping[str, float]

# Consecutive steps that must show a sign that may occur by chance in one of them: groups of equal rewards are common
# while a task is nearly always failed, or nearly always solved. A shorter run is judged by all of its steps.
RECENT = 3
START = 10  # rows of the beginning of a run, with which later ones are compared
KEPT = 100  # newest rows, in which a trend is looked for
NARROW = 0.05  # `clip_low` below which healthy updates clip most tokens
VALIDATION = "validation/reward_mean"
REWARD, STD = "train/reward_mean", "train/reward_std"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSize:
    """What the rules need to know about a job.

    Attributes:
        rivals: whether two agents both improve: several policies are trained, or one plays against its past.
        narrow_clip: whether healthy updates clip most tokens, as with `gspo`.
    """

    groups_per_step: int
    steps: int
    rivals: bool = False
    narrow_clip: bool = False

    @classmethod
    def of(cls, config: JobConfig) -> Self:
        """Return what the rules need to know of a job."""
        return cls(
            groups_per_step=config.rollout.groups_per_step,
            steps=config.steps,
            rivals=bool(config.players.pools) or len(config.trained_policies) > 1,
            narrow_clip=any(
                getattr(config.algorithm_of(name), "clip_low", 1.0) < NARROW for name in config.trained_policies
            ),
        )


class RunHistory:
    """The rows of a run that rules use: the first training steps, the newest, and those with a validation."""

    def __init__(self, job: JobSize, rows: Sequence[Row] = ()) -> None:
        """Create the history of a job. `rows`: metrics of its steps, oldest first, with the evaluation before the
        first.
        """
        self.job = job
        self.start: list[Row] = []
        self.rows: deque[Row] = deque(maxlen=KEPT)
        self.validations: deque[Row] = deque(maxlen=KEPT)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add the row of the next step. If the step has trained no episode of the policy, only its
        validation counts.
        """
        if VALIDATION in row:
            self.validations.append(row)
        if not row.get("train/episodes"):
            return
        if len(self.start) < START:
            self.start.append(row)
        self.rows.append(row)

    def copy(self) -> Self:
        """Return a copy, to which rows can be added apart."""
        made = copy.copy(self)
        made.start, made.rows, made.validations = self.start.copy(), self.rows.copy(), self.validations.copy()
        return made

    @property
    def newest(self) -> Row:
        """Return the row of the newest step, which must exist."""
        return self.rows[-1]

    @property
    def recent(self) -> list[Row]:
        """Return the last `RECENT` rows, or all of a shorter job; empty if there are fewer."""
        return self.last(min(RECENT, self.job.steps))

    def last(self, count: int) -> list[Row]:
        """Return the last rows, oldest first; empty if there are fewer than `count`."""
        return list(self.rows)[-count:] if len(self.rows) >= count else []


Seen = Callable[[RunHistory], str | None]
Shows = Callable[[Sequence[EpisodeSummary]], Sequence[EpisodeSummary]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A sign, its test, and what to do about it.

    Attributes:
        code: stable name for programs: `no_calls`, `equal_rewards`, …
        formula: condition with its thresholds, for the documents.
        shows: selects the episodes of a step that show the sign best, the clearest first.
        of_job: whether the sign concerns the whole job; otherwise each trained policy's rows are tested.
        audited: whether the half of these episodes that stands first is shown with the lowest score of the audit first.
    """

    code: str
    formula: str
    seen: Seen
    means: str
    remedy: str
    shows: Shows
    of_job: bool = False
    audited: bool = False


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of a metric over the rows that have it; None: none has."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


def in_each(rows: Sequence[Row], condition: Callable[[Row], bool]) -> bool:
    """Return whether there are rows, and a condition holds for each of them."""
    return bool(rows) and all(condition(row) for row in rows)


def in_each_recent(name: str, least: float, seen: str) -> Seen:
    """Return a test for a metric of at least `least` in each of the last steps. `seen`: description with `{now}`, the
    metric's mean over these steps.
    """

    def found(history: RunHistory) -> str | None:
        recent = history.recent
        if not in_each(recent, lambda row: row.get(name, 0.0) >= least):
            return None
        return f"{steps_of(recent)} {seen.format(now=mean(recent, name))}"

    return found


def steps_of(rows: Sequence[Row]) -> str:
    """Describe in which of the last steps a sign is present."""
    return "in the only step so far" if len(rows) == 1 else f"in each of the last {len(rows)} steps"


def reward_error(history: RunHistory, rows: Sequence[Row], of: int) -> float:
    """Return the standard error of the mean reward of `of` steps.

    The episodes of a group count as one, because they share a task: this is the largest possible error.
    """
    deviation = max((row.get(STD, 0.0) for row in rows), default=0.0)
    return deviation / math.sqrt(of * max(history.job.groups_per_step, 1))


def tokens_of_episode(row: Row) -> float:
    """Return the mean number of sampled tokens of a step's episodes."""
    return row["rollout/completion_tokens"] / max(row["train/episodes"], 1)
