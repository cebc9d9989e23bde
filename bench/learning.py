"""What the demo learns, over several seeds: `python bench/learning.py`. Writes docs/learning.md and docs/learning.png.

Each seed is one run of examples/addition.py in a process of its own, as `make demo` does it. The control is the
untrained model: the validation before the first step, the same sums, the same greedy decoding.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUN = (
    "import sys; sys.path.insert(0, {root!r}); from examples.addition import demonstrate; demonstrate({steps}, {seed})"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One seed."""

    seed: int
    rows: list[dict[str, Any]]
    wall_seconds: float
    cpu_seconds: float
    peak_mib: float
    load: float  # average of the last minute, at the end

    def validation(self) -> list[tuple[int, float]]:
        """(step, greedy reward on the held-out sums)."""
        return [(r["step"], r["validation/reward_mean"]) for r in self.rows if "validation/reward_mean" in r]


def play(seed: int, steps: int) -> Outcome:
    """Run the demo once; its time includes loading, evaluation and checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        code = RUN.format(root=str(ROOT), steps=steps, seed=seed)
        process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"seed {seed} failed")
        rows = [json.loads(line) for line in (Path(folder) / "runs/addition/metrics.jsonl").read_text().splitlines()]
    return Outcome(
        seed=seed,
        rows=rows,
        wall_seconds=time.monotonic() - started,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_mib=usage.ru_maxrss / 1024,
        load=os.getloadavg()[0],
    )


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Validation over steps, a line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for outcome in outcomes:
        x, y = zip(*outcome.validation(), strict=True)
        axes.plot(x, y, marker="o", lw=1.8, label=f"seed {outcome.seed}")
    control = outcomes[0].validation()[0][1]
    axes.axhline(control, color="#777777", ls=":", lw=1.2, label="untrained model")
    axes.set(
        xlabel="training step", ylabel="held-out sums answered right", title="SmolLM2-135M learns to add", ylim=(0, 1)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def page(outcomes: list[Outcome], steps: int) -> str:
    """docs/learning.md."""
    good = sum(o.validation()[-1][1] >= 0.75 for o in outcomes)
    lines = [
        "# What the demo learns",
        "",
        "<!-- made by `python bench/learning.py`; do not edit -->",
        "",
        f"`examples/addition.py`: {steps} steps of 16 sums x 6 answers, GRPO, all weights of SmolLM2-135M-Instruct,",
        "AdamW with a learning rate that falls from 3e-5 to 0. The 64 validation sums are held out as unordered pairs",
        "and never trained on; they are answered greedily, and one counts if the last number of the answer is right.",
        "The control is the untrained model on the same sums.",
        "",
        f"At step {steps}, {good} of {len(outcomes)} seeds answer at least 0.75 of them.",
        "",
        "![validation over steps](learning.png)",
        "",
        f"| seed | untrained | best | step {steps} | sampled reward, last 5 steps | wall s | CPU s | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        scores = [score for _, score in o.validation()]
        last = [r["train/reward_mean"] for r in o.rows[-5:]]
        lines.append(
            f"| {o.seed} | {scores[0]:.2f} | {max(scores):.2f} | {scores[-1]:.2f} | {sum(last) / len(last):.2f} | "
            f"{o.wall_seconds:.0f} | {o.cpu_seconds:.0f} | {o.peak_mib:.0f} |"
        )
    lines += [
        "",
        "Wall and CPU seconds are of the whole process: loading, 7 evaluations, checkpoints and the curve are in them.",
        f"Machine: {machine()}; {datetime.date.today()}; load average at the ends of the runs: "
        f"{', '.join(f'{o.load:.1f}' for o in outcomes)} (above 2, other work shared the cores).",
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Processor, cores, and what is used of them."""
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores, no GPU"


def main() -> None:
    """Run all seeds, one after another."""
    parser = argparse.ArgumentParser(description="The demo over several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    outcomes = []
    for seed in arguments.seeds:
        outcomes.append(play(seed, arguments.steps))
        print(f"seed {seed}: {outcomes[-1].validation()}, {outcomes[-1].wall_seconds:.0f} s", flush=True)
    draw(outcomes, ROOT / "docs" / "learning.png")
    (ROOT / "docs" / "learning.md").write_text(page(outcomes, arguments.steps))


if __name__ == "__main__":
    main()
