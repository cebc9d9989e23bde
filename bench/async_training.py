"""Asynchronous against synchronous training on a slow, uneven environment: `python bench/async_training.py`.

The job of recipes/gomoku.py, smaller, with an opponent that thinks for a lognormal time before each of its moves.
Synchronous: `max_staleness` 0. Asynchronous: 2, and tokens of older weights are corrected (`token-truncate`). Both have
the same tasks, the same batches and as many games at the same time as a step has. Writes docs/async.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MEDIAN_SECONDS, SIGMA, LONGEST_SECONDS = 0.1, 1.2, 4.0
STALENESS = (0, 2)


def train(seed: int, steps: int, staleness: int) -> dict[str, float]:
    """One run, in this process: seconds from the first step's begin to the last one's end, and the last validation."""
    import palestra
    from palestra import JobConfig, RolloutSpec
    from recipes.gomoku import Letters, Player, games, job

    class Thinking(Letters):
        """Waits before it answers."""

        blocking = True

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            time.sleep(min(LONGEST_SECONDS, random.lognormvariate(math.log(MEDIAN_SECONDS), SIGMA)))
            return super().step(action)

    config = job(seed, steps).model_dump()
    config["rollout"] |= {"groups_per_step": 8, "group_size": 16, "max_staleness": staleness}
    config["algorithm"] |= {"importance_sampling": "token-truncate" if staleness else "none"}
    config["evaluation"] |= {"every_steps": steps}
    result = palestra.train(
        RolloutSpec(environment=Thinking, agents={"agent": Player()}),
        games("train", range(1000, 1000 + 8 * (steps + 2))),
        JobConfig.model_validate(config),
        validation_tasks=games("fresh", range(200)),
        concurrency=128,
        quiet=True,
    )
    first, last = result.metrics[0], result.metrics[-1]
    return {
        "seconds": last["wall_seconds"] - first["wall_seconds"],
        "untrained": first["validation/reward_mean"],
        "trained": last["validation/reward_mean"],
        "staleness": max(row.get("rollout/staleness_max", 0.0) for row in result.metrics),
    }


def play(seed: int, steps: int, staleness: int) -> dict[str, float]:
    """One run in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--one", str(seed), str(staleness), "--steps", str(steps)]
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(results: dict[int, list[dict[str, float]]], seeds: list[int], steps: int) -> str:
    """docs/async.md."""
    from bench.learning import machine

    lines = [
        "# Asynchronous training on a slow, uneven environment",
        "",
        "<!-- made by `python bench/async_training.py`; do not edit -->",
        "",
        f"The job of `recipes/gomoku.py` with {steps} steps of 8 groups x 16 games. Before each of its moves",
        f"the opponent thinks for a lognormal time: median {MEDIAN_SECONDS:g} s, sigma {SIGMA:g}, at most "
        f"{LONGEST_SECONDS:g} s. 128 games are played at the same time.",
        "Validation: 200 fresh games, greedily.",
        "",
        "| seed | `max_staleness` | wall s | untrained | trained | most versions behind |",
        "|---|---|---|---|---|---|",
    ]
    for staleness, runs in results.items():
        lines += [
            f"| {seed} | {staleness} | {r['seconds']:.0f} | {r['untrained']:.2f} | {r['trained']:.2f} | "
            f"{r['staleness']:g} |"
            for seed, r in zip(seeds, runs, strict=True)
        ]
    means = {s: fmean(r["seconds"] for r in runs) for s, runs in results.items()}
    ends = {s: [r["trained"] for r in runs] for s, runs in results.items()}
    spread = {s: f"{fmean(e):.3f} ± {stdev(e) if len(e) > 1 else 0:.3f}" for s, e in ends.items()}
    lines += [
        "",
        f"Mean speed-up: {means[0] / means[2]:.2f}. Trained, mean and deviation over the seeds: "
        f"{spread[0]} synchronous, {spread[2]} asynchronous.",
        "",
        f"Wall seconds are from the first step's begin to the end of the last evaluation. Machine: {machine()};",
        f"{datetime.date.today()}; load average at the end {os.getloadavg()[0]:.1f} "
        "(above 2, other work shared the cores).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """All seeds of both, in turns, so that other work on the machine meets both."""
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous training.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--one", type=int, nargs=2, metavar=("SEED", "STALENESS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(train(arguments.one[0], arguments.steps, arguments.one[1])))
        return
    results: dict[int, list[dict[str, float]]] = {staleness: [] for staleness in STALENESS}
    for seed in arguments.seeds:
        for staleness in STALENESS:
            results[staleness].append(play(seed, arguments.steps, staleness))
            print(f"seed {seed}, max_staleness {staleness}: {results[staleness][-1]}", flush=True)
    (ROOT / "docs" / "async.md").write_text(page(results, arguments.seeds, arguments.steps))


if __name__ == "__main__":
    main()
