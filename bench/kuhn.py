"""Two policies at Kuhn poker, measured against the truth: `python bench/kuhn.py --seeds 0 1 2`.

Each run is `python recipes/kuhn_poker.py` in a process of its own, below `--folder`; a run whose result
is there is not repeated. Afterwards the part of docs/learning.md is replaced, with its picture.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
PAGE, PICTURE = ROOT / "docs" / "learning.md", ROOT / "docs" / "learning-kuhn.png"
ABOUT = """## Kuhn poker: two policies, and the truth

`recipes/kuhn_poker.py`: two models of 2 layers with random weights play against each other and are trained apart, each
by its own rewards: {steps} steps of 384 games, RLOO with a bonus of entropy of 0.2. The moves are held to the legal
ones, so the probabilities of all twelve information states are read off the models, and exploitability and value are
exact. The average is the mean of the probabilities of all checkpoints so far. At random 0.458; perfect play is 0, and
brings the first player -1/18 = -0.056 a game.
"""


def main() -> None:
    """Make the runs that are missing, and write page and picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "kuhn")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    runs = [("self", seed) for seed in arguments.seeds] + [("frozen", 0), ("shared", 0)]
    found = {run: result_of(arguments.folder, *run, arguments.steps) for run in runs}
    draw([found["self", seed]["rows"] for seed in arguments.seeds])
    write(arguments.steps, found, arguments.seeds)


def result_of(folder: Path, against: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the rows and the seconds of a run, which is made if its file is not there."""
    from palestra.config import SAVED_CONFIG, load_config
    from recipes.kuhn_poker import checkpoint, read_off, truth

    saved, run = folder / f"{against}-{seed}.json", folder / "runs" / f"kuhn-{against}-{seed}"
    if not saved.is_file():
        options = ["--steps", str(steps), "--seed", str(seed), "--against", against]
        script = str(ROOT / "recipes" / "kuhn_poker.py")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, script, *options], cwd=folder, env=environment, check=True)
        seconds = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["wall_seconds"]
        config = load_config(run / SAVED_CONFIG)
        at = Path.cwd()
        os.chdir(folder)  # the models of random weights are named from there
        rows = truth(Path("runs") / run.name, config, against)
        best = None
        if against == "frozen":
            last = read_off(checkpoint(Path("runs") / run.name, "first", steps), config.policies["second"].model)
            best = last.best_responses[0]
        os.chdir(at)
        saved.write_text(json.dumps({"rows": rows, "seconds": seconds, "best": best}))
    found: dict[str, Any] = json.loads(saved.read_text())
    return found


def draw(seeds: list[list[list[float]]]) -> None:
    """Draw exploitability and value over games, a line for each seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, last, average in ((left, 1, 2), (right, 3, 4)):
        for number, rows in enumerate(seeds):
            games = [row[0] / 1000 for row in rows]
            kinds = ((last, "#9aa5b1", 0.9, "last policies"), (average, "#c0392b", 2.0, "their average"))
            for column, colour, width, label in kinds:
                drawn = [row[column] for row in rows]
                axes.plot(games, drawn, color=colour, lw=width, label=label if number == 0 else None)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_xlabel("thousand games")
    left.axhline(0.15, color="black", lw=0.8, ls=":")
    left.annotate("0.15", (0, 0.15), textcoords="offset points", xytext=(2, 3), fontsize=8)
    left.set(ylabel="exploitability", title="0 is perfect play", ylim=(0, None))
    right.axhline(-1 / 18, color="black", lw=0.8, ls=":")
    right.annotate("-1/18, perfect play", (0, -1 / 18), textcoords="offset points", xytext=(2, -11), fontsize=8)
    right.set(ylabel="value of the first player", title="what the first player wins a game")
    left.legend(frameon=False)
    figure.savefig(PICTURE)


def write(steps: int, found: dict[tuple[str, int], dict[str, Any]], seeds: list[int]) -> None:
    """Write the part of the page."""
    lines = [ABOUT.format(steps=steps), f"![exploitability and value over games]({PICTURE.name})", ""]
    lines += [
        "| against | seed | exploitability: average | last | value: average | last | games | wall s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (against, seed), one in found.items():
        games, last, average, value, mean = one["rows"][-1]
        cells = f"{average:.3f} | {last:.3f} | {mean:.3f} | {value:.3f} | {games:,.0f} | {one['seconds']:.0f}"
        lines.append(f"| {against} | {seed} | {cells} |")
    frozen, best = found["frozen", 0]["rows"][-1], found["frozen", 0]["best"]
    from learning import machine, written

    lines += [
        "",
        "`frozen`: the first player alone is trained, against a second that moves at random; it wins "
        f"{frozen[3]:.3f} a game,\nand a best response {best:.3f} ({frozen[3] / best:.0%}). "
        "`shared`: one policy plays both roles.",
        "",
        f"`python bench/kuhn.py --seeds {' '.join(map(str, seeds))}`. Wall seconds are of the training,",
        f"beside other work. Machine: {machine()}; {datetime.date.today()}.",
        "",
    ]
    PAGE.write_text(written(PAGE.read_text(), "kuhn", "\n".join(lines)))


if __name__ == "__main__":
    main()
