"""Rows of made-up runs: a healthy one, which learns, and changes that plant a fault in it."""

from __future__ import annotations

import random
from collections.abc import Callable

from palestra.doctor.examination import findings_of
from palestra.doctor.rule import JobSize

JOB = JobSize(groups_per_step=16, steps=100)
Change = Callable[[int], dict[str, float]]


def healthy(step: int, noise: random.Random) -> dict[str, float]:
    """A step of a run that learns: the reward rises, entropy and lengths fall, all with noise."""
    learned = 1 - 0.95**step
    return {
        "step": float(step),
        "train/episodes": 128.0,
        "train/episodes_without_tokens": 0.0,
        "train/episodes_discarded": 0.0,
        "train/groups_zero_variance": 4.0,
        "train/groups_dropped": 0.0,
        "train/reward_mean": 0.1 + 0.7 * learned + noise.gauss(0, 0.03),
        "train/reward_std": 0.4,
        "train/trained_tokens": 4000.0,
        "train/updates_skipped": 0.0,
        "train/grad_norm": 0.7,
        "train/learning_rate": 1e-5,
        "train/entropy": 0.8 - 0.6 * learned + noise.gauss(0, 0.02),
        "train/logprob_gap_mean": 0.004 + abs(noise.gauss(0, 0.001)),
        "train/ratio_mean": 1 + noise.gauss(0, 0.01),
        "train/clip_fraction_on_policy": 0.01,
        "rollout/completion_tokens": 128 * (60 - 20 * learned + noise.gauss(0, 2)),
        "rollout/truncated_share": 0.1,
        "rollout/drift_share": 0.02,
        "rollout/forks_edited_message": 1.0,
        "rollout/staleness_max": 0.0,
        "store/claims": 130.0,
        "store/failures": 2.0,
        "disk/free_bytes": 500e9,
        "disk/needed_bytes": 2e9,
    }


def run_of(count: int, change: Change = lambda step: {}, seed: int = 0) -> list[dict[str, float]]:
    """Rows of `count` steps, each with the numbers of `change`, whose names have `__` for `/`."""
    noise = random.Random(seed)
    rows = [healthy(step, noise) for step in range(1, count + 1)]
    return [row | {name.replace("__", "/"): value for name, value in change(int(row["step"])).items()} for row in rows]


def found(rows: list[dict[str, float]]) -> dict[str, tuple[int, int]]:
    """(since, until) of each finding, by code."""
    return {one.code: (one.since, one.until) for one in findings_of(rows, JOB)}
