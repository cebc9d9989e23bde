"""Results of a comparison's runs: validation over sampled tokens, and the numbers of the page's tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import ConfigError
from palestra.types.metrics import of_policy
from palestra_lab.comparison.one_run import FAILED, FINISHED, read_record
from palestra_lab.comparison.plan import PlannedRun

if TYPE_CHECKING:
    from palestra_lab.comparison.kept import KeptResults

Row = Mapping[str, float]
TOKENS, SECONDS, TOTAL = "rollout/sampled_tokens", "time/step_seconds", "validation/total"  # metrics that are read


@dataclass(frozen=True, slots=True)
class Point:
    """One validation of a run.

    Attributes:
        seconds: of all steps before it, without validations.
        reward: mean over the validation tasks.
    """

    tokens: float
    seconds: float
    reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """A finished run.

    Attributes:
        points: its validations, oldest first, beginning with the untrained model; at least one.
        tokens: sampled in the whole run.
        seconds: of all steps, without validations.
    """

    seed: int
    points: tuple[Point, ...]
    tokens: float
    seconds: float

    @property
    def final(self) -> float:
        """Return the reward of the last validation."""
        return self.points[-1].reward

    @property
    def best(self) -> float:
        """Return the largest reward of all validations."""
        return max(point.reward for point in self.points)

    def first_at(self, threshold: float) -> Point | None:
        """Return the first validation with at least this reward, or None."""
        return next((point for point in self.points if point.reward >= threshold), None)

    def at(self, tokens: float) -> float | None:
        """Return the reward after so many tokens, interpolated between validations; None: the run ended before.

        Of several validations after equally many tokens the first counts.
        """
        for before, after in zip(self.points, self.points[1:], strict=False):
            if tokens == before.tokens:
                return before.reward
            if before.tokens < tokens <= after.tokens:
                share = (tokens - before.tokens) / (after.tokens - before.tokens)
                return before.reward + share * (after.reward - before.reward)
        return self.points[0].reward if tokens == self.points[0].tokens else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """A run that has ended with an error."""

    run: PlannedRun
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """All runs of a comparison.

    Attributes:
        finished: by (scenario, algorithm, policy), in order of the seeds; the policy is "" if only one is trained.
        open: number of runs that are neither finished nor failed.
    """

    finished: Mapping[tuple[str, str, str], Sequence[RunResult]]
    failures: Sequence[RunFailure]
    open: int
    machines: Sequence[str] = ()

    @property
    def done(self) -> int:
        """Return the number of finished runs."""
        runs = {(scenario, algorithm): len(found) for (scenario, algorithm, _), found in self.finished.items()}
        return sum(runs.values())


def read_rows(folder: Path) -> list[Row]:
    """Return the metrics of a run so far, without an incomplete line."""
    path = folder / "metrics.jsonl"
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {(error.strerror or str(error)).lower()}") from error
    return [_row(line, number, path) for number, line in enumerate(lines, 1)]


def _row(line: bytes, number: int, path: Path) -> Row:
    """Return a row of metrics; line number and file are for errors."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not all(isinstance(value, int | float) for value in row.values()):
        raise ConfigError(
            f"{path}:{number} is no row of metrics; put the file back from a copy, or remove {path.parent} and its "
            "record to run it again"
        )
    return row


def reward_name(policy: str) -> str:
    """Return the name of the compared metric; `policy` is "" if only one is trained."""
    return of_policy("validation/reward_mean", policy) if policy else "validation/reward_mean"


def result_of(seed: int, rows: Sequence[Row], policy: str = "") -> RunResult:
    """Return the result of a run. `policy`: whose rewards count; "" if only one is trained."""
    name = reward_name(policy)
    tokens = seconds = 0.0
    points = []
    for row in rows:
        tokens = row.get(TOKENS, tokens)
        seconds += row.get(SECONDS, 0.0)
        if name in row:
            points.append(Point(tokens, seconds, row[name]))
    return RunResult(seed=seed, points=tuple(points), tokens=tokens, seconds=seconds)


def _unscored(rows: Sequence[Row], policy: str) -> str | None:
    """Return why a finished run's validations can't be reported: the first or the last is missing; None: they can."""
    scored = [reward_name(policy) in row for row in rows if TOTAL in row]
    whose = f" for {policy!r}" if policy else ""
    if not any(scored):
        return f"none of its validation episodes was scored{whose}"
    ends = [name for name, known in (("first", scored[0]), ("last", scored[-1])) if not known]
    return f"none of the episodes of its {ends[0]} validation was scored{whose}" if ends else None


def read_results(runs: Sequence[PlannedRun], kept: KeptResults | None = None) -> Results:
    """Read the results of a plan's runs. `kept`: results of runs whose folders are elsewhere, updated with runs
    finished here; None: none.
    """
    finished: dict[tuple[str, str, str], list[RunResult]] = {}
    failures, left, machines = [], 0, dict[str, None]()
    for run in runs:
        record = read_record(run.record) or {}
        here = record.get("state") == FINISHED
        rows = read_rows(run.folder) if here else kept.rows(run) if kept is not None else None
        if rows is not None:
            reasons = [reason for policy in run.policies if (reason := _unscored(rows, policy)) is not None]
            if reasons:
                failures.append(RunFailure(run=run, reason=reasons[0]))
                continue
            for policy in run.policies:
                of_run = result_of(run.seed, rows, policy)
                finished.setdefault((run.scenario, run.algorithm, policy), []).append(of_run)
            if here and kept is not None:
                kept.add(run, rows)
            machines[machine() if here or kept is None else kept.machine(run)] = None
        elif record.get("state") == FAILED:
            failures.append(RunFailure(run=run, reason=str(record.get("reason", ""))))
        else:
            left += 1
    for results in finished.values():
        results.sort(key=lambda result: result.seed)
    return Results(finished=finished, failures=failures, open=left, machines=tuple(machines))


def machine() -> str:
    """Return the processor and the number of cores of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )
    return f"{name}, {os.cpu_count()} cores"
