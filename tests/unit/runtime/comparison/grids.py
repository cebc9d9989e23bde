"""A comparison that is read, planned and filled with results without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.extensions import load_function
from palestra_lab.comparison.one_run import FINISHED, write_record
from palestra_lab.comparison.plan import PlannedRun, plan_runs
from palestra_lab.config import ComparisonConfig, load_comparison

JOB = """
steps = 7
model = "tiny-random"
[environment]
name = "arithmetic"
train_tasks = 32
validation_tasks = 4
[policies.policy.sampling]
max_tokens = 8
[rollout]
group_size = 4
groups_per_step = 2
[algorithm]
name = "dr_grpo"
clip_low = 0.11
[evaluation]
every_steps = 3
[checkpoint]
keep = 3
"""
GRID = """
name = "small"
output = "out"
seeds = [3, 1]
evaluations = 4
[scenarios.sums]
job = "job.toml"
token_budget = 400
threshold = 0.5
[algorithms.grpo]
[algorithms.flat]
name = "grpo"
advantage_scale = "none"
overrides.rollout.group_size = 2
"""


def write_grid(folder: Path, grid: str = GRID) -> Path:
    """Write the files of a comparison and return the path of its TOML file."""
    (folder / "job.toml").write_text(JOB)
    (folder / "compare.toml").write_text(grid)
    return folder / "compare.toml"


def planned(folder: Path, grid: str = GRID) -> tuple[ComparisonConfig, list[PlannedRun]]:
    """Return a comparison and its runs."""
    comparison = load_comparison(write_grid(folder, grid))
    return comparison, plan_runs(comparison, load_function)


def finish(run: PlannedRun, rows: Sequence[Mapping[str, Any]], **record: Any) -> None:
    """Write the files that a finished run leaves."""
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_record(run.record, {**run.settings, "checkpoints": "newest", "state": FINISHED} | record)


def rows(*points: tuple[int, float | None], step_seconds: float = 2.0) -> list[dict[str, float]]:
    """Return the metrics of a run: a step for each (tokens, reward); a reward of None: that step has no validation."""
    found = []
    for number, (tokens, reward) in enumerate(points):
        row: dict[str, float] = {"step": number, "wall_seconds": 10.0 * number}
        if number:
            row |= {"rollout/sampled_tokens": tokens, "time/step_seconds": step_seconds}
        scored = {"validation/scored": 3.0, "validation/total": 3.0}
        found.append(row | ({} if reward is None else scored | {"validation/reward_mean": reward}))
    return found
