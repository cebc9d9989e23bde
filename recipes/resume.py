"""Resume: a run is killed without warning, and continues where it was; nothing that was accepted is lost.

    python recipes/resume.py [--steps 6] [--model tiny-random]

The run is started in a process of its own, killed (SIGKILL) when it has trained two steps, and continued here with
`resume=True`. With `deterministic` the weights end bit for bit as those of a run that was not killed. What it prints is
in README.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import palestra
from palestra import JobConfig, ModelAgent, RolloutSpec
from palestra_worlds import Gomoku


def train(folder: Path, steps: int, model: str, resume: bool) -> palestra.TrainResult:
    """Train in `folder`; with `resume`, continue what is there."""
    settings = {
        "run_dir": folder,  # YOURS 1: where the run is; without it, runs/NAME
        "steps": steps,
        "deterministic": True,
        "policies": {"player": {"model": model, "max_context": 256, "sampling": {"max_tokens": 8}}},  # YOURS 2
        "rollout": {"groups_per_step": 2, "group_size": 4},
        "checkpoint": {"every_steps": 1},  # YOURS 3: what lies after the newest one is trained again from its manifest
        "engine": {"threads": 1},
        "trainer": {"threads": 1},
    }
    tasks = [{"id": f"game{seed}", "seed": seed} for seed in range(2 * steps)]
    moves = [f"{row} {column}" for row in (1, 2, 3) for column in (1, 2, 3)]
    play = RolloutSpec(environment=Gomoku, agents={"agent": ModelAgent(choices=moves)})
    return palestra.train(play, tasks, JobConfig.model_validate(settings), resume=resume, quiet=not resume)


def demonstrate(steps: int, model: str) -> None:
    """Start a run, kill it, and continue it."""
    folder = Path("runs") / f"killed-{time.strftime('%H%M%S')}"
    metrics = folder / "metrics.jsonl"  # a line for each step
    options = ["--folder", str(folder), "--steps", str(steps), "--model", model]
    running = subprocess.Popen([sys.executable, __file__, *options])
    while running.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.05)
    running.kill()
    running.wait()
    print(f"killed when {metrics.read_text().count(chr(10))} of {steps} steps were recorded")
    result = train(folder, steps, model, resume=True)
    trained = [row["step"] for row in result.metrics if row["step"]]
    print(f"steps trained: {', '.join(f'{step:g}' for step in trained)}; {result.checkpoint}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A run is killed and continued.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--folder", type=Path, help="be the run that is killed, in this folder")
    arguments = parser.parse_args()
    if arguments.folder:
        train(arguments.folder, arguments.steps, arguments.model, resume=False)
    else:
        demonstrate(arguments.steps, arguments.model)
