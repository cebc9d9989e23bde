"""Models that learn to see, beside the same models blindfolded: their runs, curves, and part of docs/learning.md.

`vision_digits.py` and others each describe a `Trial`, or several, and call `main`. Every run is made by the script in a
process of its own (`--one`), and leaves its result below `--folder`; a run whose result is there is not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning import PAGE, PATIENT, ROOT, machine, written

SCORE, SAMPLED = "validation/reward_mean", "train/reward_mean"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What tells runs of a trial apart.

    Attributes:
        label: in tables and pictures.
        about: a sentence for the page, where such a run was made.
    """

    label: str
    about: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Something to be learned by looking, and what is said about it.

    Attributes:
        script: in `bench`, without `.py`.
        name: of its part of the page, and of the picture's file.
        heading: of its part of the page, and of the picture.
        about: that part's text; `{steps}` and `{chance}` are filled in.
        measure: the axis of the picture.
        steps: of a run.
        kinds: by their names in the command.
        blind: the kind that sees nothing.
        runs: kind and seed of each run that is made unless others are asked for.
        target: the least held-out score of a run that sees.
        chance: returns the greatest held-out score of a model that plays greedily and sees nothing.
        play: makes the run of a kind and a seed, with so many steps, in a folder.
    """

    script: str
    name: str
    heading: str
    about: str
    measure: str
    steps: int
    kinds: Mapping[str, Kind]
    blind: str
    runs: Sequence[tuple[str, int]]
    target: float
    chance: Callable[[], float]
    play: Callable[[str, int, int, Path], object]

    @property
    def picture(self) -> Path:
        """Where the curves are drawn."""
        return ROOT / "docs" / f"learning-{self.name.replace('_', '-')}.png"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run has learned.

    Attributes:
        kind: one of the trial's.
        seed: of the job.
        rows: of its `metrics.jsonl`.
        wall_seconds, cpu_seconds, peak_mib: of its process.
        load: average of the machine's last minute, at its end.
    """

    kind: str
    seed: int
    rows: list[dict[str, Any]]
    wall_seconds: float
    cpu_seconds: float
    peak_mib: float
    load: float

    @property
    def scores(self) -> list[tuple[int, float]]:
        """Return (step, held-out score)."""
        return [(row["step"], row[SCORE]) for row in self.rows if SCORE in row]

    @property
    def sampled(self) -> list[tuple[int, float]]:
        """Return (step, mean reward of its sampled episodes)."""
        return [(row["step"], row[SAMPLED]) for row in self.rows if SAMPLED in row]


def main(*trials: Trial) -> int:
    """Make the runs that are missing, print what each has learned, and write parts of the page and pictures.

    A part is written where runs of its trial were asked for; others stay as they are.

    Args:
        trials: of one script; no two have a kind of the same name.

    Returns:
        0, or 1 if a run is on the wrong side of its trial's numbers.
    """
    script = trials[0].script
    trial_of = {kind: trial for trial in trials for kind in trial.kinds}
    parser = argparse.ArgumentParser(description=" ".join(trial.heading for trial in trials))
    known = [f"{kind}-{seed}" for trial in trials for kind, seed in trial.runs]
    parser.add_argument("--runs", nargs="+", default=known, metavar="KIND-SEED", help=f"default: {' '.join(known)}")
    parser.add_argument("--steps", type=int, help="default: those of the trial")
    parser.add_argument("--folder", type=Path, default=Path("runs") / script)
    parser.add_argument("--no-page", action="store_true", help="leave docs/learning.md as it is")
    parser.add_argument("--one", nargs=2, metavar=("KIND-SEED", "RUN"), help="make this run in a folder, and no more")
    given = parser.parse_args()
    for name in given.runs:
        if name.rpartition("-")[0] not in trial_of:
            parser.error(f"there is no run {name!r}; a run is one of {', '.join(trial_of)}, and a seed: {known[0]}")
    if given.one is not None:
        kind, _, seed = given.one[0].rpartition("-")
        trial_of[kind].play(kind, int(seed), given.steps or trial_of[kind].steps, Path(given.one[1]))
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for trial in trials:
        names = [name for name in given.runs if trial_of[name.rpartition("-")[0]] is trial]
        steps = given.steps or trial.steps
        if not names:
            continue
        runs, chance = list[Run](), trial.chance()
        sys.stdout.write(f"{trial.heading}: the best without seeing is {chance:.3f}\n")
        for name in names:
            runs.append(run := result_of(trial, name, steps, given.folder))
            (_, before), *_, (_, after) = run.scores
            words = f"{trial.kinds[run.kind].label}, seed {run.seed}: held-out {before:.3f} before, {after:.3f} after"
            sys.stdout.write(f"{words} {steps} steps, {run.wall_seconds:.0f} s\n")
            sys.stdout.flush()
            failed |= after > chance if run.kind == trial.blind else after < trial.target
        if not given.no_page:
            draw(trial, runs, chance)
            PAGE.write_text(written(PAGE.read_text(), trial.name, part(trial, runs, names, steps, chance)))
    return int(failed)


def result_of(trial: Trial, name: str, steps: int, folder: Path) -> Run:
    """Return a run, which is made if its file is not there."""
    saved = folder / f"{name}-steps-{steps}.json"
    if not saved.is_file():
        with tempfile.TemporaryDirectory(prefix=f"{trial.script}-") as place:
            run, started = Path(place) / "run", time.monotonic()
            script = str(ROOT / "bench" / f"{trial.script}.py")
            command = [sys.executable, script, "--one", name, str(run), "--steps", str(steps)]
            with (folder / f"{name}.log").open("w") as log:
                variables = os.environ | PATIENT | {"OMP_NUM_THREADS": "1"}
                process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
                _, status, usage = os.wait4(process.pid, 0)
            if status:
                raise SystemExit(f"{name} failed; see {folder / name}.log")
            found = {
                "rows": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
                "wall_seconds": time.monotonic() - started,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "peak_mib": usage.ru_maxrss / 1024,
                "load": os.getloadavg()[0],
            }
        saved.write_text(json.dumps(found))
    kind, _, seed = name.rpartition("-")
    return Run(kind=kind, seed=int(seed), **json.loads(saved.read_text()))


def draw(trial: Trial, runs: Sequence[Run], chance: float) -> None:
    """Draw held-out scores over steps, a line for each run, with the sampled rewards behind them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        blind = run.kind == trial.blind
        colour = "#777777" if blind else f"C{number}"
        axes.plot(*zip(*run.sampled, strict=True), color=colour, lw=3, alpha=0.2)
        label, style = f"{trial.kinds[run.kind].label}, seed {run.seed}", "--" if blind else "-"
        axes.plot(*zip(*run.scores, strict=True), color=colour, ls=style, marker="o", lw=1.8, label=label)
    axes.axhline(chance, color="#222222", ls=":", lw=1.0, label="best without seeing")
    axes.set(xlabel="training step", ylabel=trial.measure, title=trial.heading, ylim=(0.0, 1.04))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(trial.picture)


def part(trial: Trial, runs: Sequence[Run], names: Sequence[str], steps: int, chance: float) -> str:
    """Return what docs/learning.md says of a trial."""
    lines = [
        f"## {trial.heading}",
        "",
        trial.about.strip().format(steps=steps, chance=chance),
        *(trial.kinds[kind].about for kind in dict.fromkeys(run.kind for run in runs)),
        "",
        f"![held-out scores over steps]({trial.picture.name})",
        "",
        f"| run | seed | held-out: untrained | step {steps} | sampled, step 1 | last 3 steps "
        "| wall s | CPU s | peak MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in runs:
        scores, sampled = [score for _, score in run.scores], [reward for _, reward in run.sampled]
        last = sampled[-3:]
        lines.append(
            f"| {trial.kinds[run.kind].label} | {run.seed} | {scores[0]:.2f} | {scores[-1]:.2f} | {sampled[0]:.2f} | "
            f"{sum(last) / len(last):.2f} | {run.wall_seconds:.0f} | {run.cpu_seconds:.0f} | {run.peak_mib:.0f} |"
        )
    command = f"python bench/{trial.script}.py --runs {' '.join(names)}"
    lines += [
        "",
        "In the picture, thick pale lines are the rewards of each step's sampled episodes, the others held-out scores.",
        "",
        f"`{command}`. Wall and CPU seconds are of the whole process: loading, evaluations, a checkpoint.",
        f"Machine: {machine()}; {datetime.date.today()}; load average at the ends of the runs: "
        f"{', '.join(f'{run.load:.1f}' for run in runs)} (above 2, other work shared the cores).",
    ]
    return "\n".join(lines) + "\n"
