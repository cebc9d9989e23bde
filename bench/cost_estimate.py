"""How well `palestra check` estimates what jobs cost: ten small jobs, each estimated, then run to its end.

    python bench/cost_estimate.py [--jobs 10] [--model tiny-random]

Each job is checked by `palestra check` (two real steps), run by `palestra run`, and charged by `palestra cost`. Prices
are those of an hour of the machine and of tokens, so that money has both. The table has the estimate beside what was
spent; the goal is 15 % in nine of ten jobs. Other programs on the machine change the hours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from palestra.config import dump_config, parse_config

JOBS = [  # environment, steps, group size, groups of a step, longest reply
    ("arithmetic", 12, 4, 4, 24),
    ("arithmetic", 20, 4, 2, 16),
    ("arithmetic", 8, 8, 4, 32),
    ("arithmetic", 16, 2, 4, 48),
    ("calculator", 10, 4, 2, 24),
    ("calculator", 14, 2, 4, 16),
    ("gomoku", 8, 2, 2, 12),
    ("gomoku", 12, 2, 2, 8),
    ("calculator", 8, 4, 4, 32),
    ("arithmetic", 24, 4, 4, 12),
]


def palestra(*words: str | Path) -> str:
    """Run a command of the command line, and return what it prints."""
    command = [sys.executable, "-m", "palestra.cli.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def tried(number: int, model: str, folder: Path) -> bool:
    """Estimate and run one job, print both, and return whether the money is within 15 %."""
    name, steps, size, groups, tokens = JOBS[number]
    config = parse_config(
        {
            "name": f"job-{number}",
            "run_dir": str(folder / f"run-{number}"),
            "steps": steps,
            "environment": {"name": name},
            "policies": {"policy": {"model": model, "sampling": {"max_tokens": tokens}}},
            "rollout": {"group_size": size, "groups_per_step": groups},
            "evaluation": {"every_steps": 0},
            "prices": {"device_hour": 1.0, "tokens": {"policy": [1.0, 3.0]}},
        }
    )
    path = folder / f"job-{number}.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    estimate = json.loads(palestra("check", path, "--json"))["estimate"]
    palestra("run", path)
    total = json.loads(palestra("cost", folder / f"run-{number}", "--json"))["total"]
    spent = {
        "tokens": total["prompt_tokens"] + total["reply_tokens"],
        "hours": total["ms"] / 3_600_000,
        "money": float(total["money"]),
    }
    cells = []
    for what, real in spent.items():
        low, mean, high = estimate[what]
        inside = "in" if low <= real <= high else "out"
        cells.append(f"{mean:>10.4g} {real:>10.4g} {100 * (mean / real - 1):>+6.0f} % {inside:>4}")
    print(f"{name:<11} {steps:>5}  {' | '.join(cells)}", flush=True)
    return abs(estimate["money"][1] / spent["money"] - 1) <= 0.15


def main() -> None:
    """Try the jobs, and print how many estimates were near."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="how many of them; without it, all ten")
    parser.add_argument("--model", default="tiny-random")
    arguments = parser.parse_args()
    columns = " | ".join(f"{f'{what}: estimate':>10} {'real':>6} {'error':>7}" for what in ("tokens", "hours", "money"))
    print(f"{'job':<11} {'steps':>5}  {columns}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        near = sum(tried(number, arguments.model, Path(folder)) for number in range(arguments.jobs))
    print(f"money within 15 % in {near} of {arguments.jobs} jobs")


if __name__ == "__main__":
    main()
