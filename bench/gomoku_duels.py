"""Two policies learn Gomoku on 3 x 3 against each other: `python bench/gomoku_duels.py --seeds 0 1 2`.

Each seed is trained and measured in a process of its own, below `--folder`; a seed that has a result there is not run
again. Then the part of docs/learning.md is replaced, with its two pictures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
PAGE = ROOT / "docs" / "learning.md"
CURVES, MATRIX = ROOT / "docs" / "learning-gomoku-duels.png", ROOT / "docs" / "learning-gomoku-duels-matrix.png"
COLOURS = {"white": "#0072B2", "black": "#D55E00"}
GROUPS, EVERY, GAMES = 12, 8, 20
ABOUT = """## Gomoku of two policies: opposing curves, and a matrix of versions

Two models of random weights, `white` and `black`, play Gomoku on 3 x 3 against each other; board, agent and moves
are those of `recipes/gomoku_self_play.py`. They are trained apart, each by its own rewards: {steps} steps of
{groups} groups of 16 games; who begins alternates from group to group. A win is 1 and a draw 0.5, so the two
rewards of a game sum to 1, and the curves on the left mirror each other. They say who is ahead, and not whether
both get better. So versions of both, one every {every} steps, play each other afterwards, and a player who draws
its moves: {games} games of each pair, in each seat.
"""


def main() -> None:
    """Make the runs that are missing, and write page and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "gomoku-duels")
    parser.add_argument("--one", type=int, help="train and measure this seed alone")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.one is not None:
        os.chdir(arguments.folder)
        measure(arguments.one, arguments.steps)
        return
    for seed in arguments.seeds:
        if not (arguments.folder / f"seed-{seed}.json").is_file():
            words = ["--one", str(seed), "--steps", str(arguments.steps), "--folder", str(arguments.folder)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, str(Path(__file__).resolve()), *words], env=environment, check=True)
    found = {seed: json.loads((arguments.folder / f"seed-{seed}.json").read_text()) for seed in arguments.seeds}
    draw(found)
    write(found, arguments.steps, arguments.folder)


def measure(seed: int, steps: int) -> None:
    """Train two policies, let their versions play each other, and write the result of one seed."""
    import palestra
    import palestra_lab
    from recipes.gomoku_self_play import Duel, Player, free

    config = job(seed, steps)
    began = time.perf_counter()
    tasks = [{"id": f"game{n}", "first": Duel.roles[n % 2]} for n in range(GROUPS * steps)]
    play = palestra.RolloutSpec(environment=Duel, agents={"": Player()})
    result = palestra.train(play, tasks, config, concurrency=128)
    seconds = time.perf_counter() - began
    versions = {name: palestra_lab.versions_of(result.run_dir, name) for name in COLOURS}
    players = {"untrained": "tiny-random"} | versions["white"] | versions["black"]
    matrix = palestra_lab.play_matrix(
        players,
        Duel,
        config,
        agent=Player(),
        moves=free,
        tasks=[{"first": role} for role in Duel.roles],
        games=GAMES,
        concurrency=128,
    )
    matrix.write_json(Path(f"matrix-{seed}.json"))
    palestra_lab.draw_matrix(
        matrix, f"Gomoku 3 x 3: versions of white and black, seed {seed}", Path(f"matrix-{seed}.png")
    )
    cells = {
        name: [
            (
                int(version.rpartition("@")[2]),
                *pair(matrix, version, "random"),
                *pair(matrix, version, last(versions, name)),
            )
            for version in own
        ]
        for name, own in versions.items()
    }
    found = {
        "seconds": seconds,
        "measured": time.perf_counter() - began - seconds,
        "train": {name: [row[f"{name}/train/reward_mean"] for row in result.metrics] for name in COLOURS},
        "against": cells,
        "elo": {name: rating and [rating.elo, rating.half] for name, rating in matrix.ratings.items()},
        "untrained": pair(matrix, "untrained", "random"),
    }
    Path(f"seed-{seed}.json").write_text(json.dumps(found))


def pair(matrix: Any, row: str, column: str) -> tuple[float, float]:
    """Return mean and half interval of a cell."""
    cell = matrix.cell(row, column)
    return cell.mean, cell.half or 0.0


def last(versions: dict[str, dict[str, str]], name: str) -> str:
    """Return the newest version of the other policy."""
    return list(versions["black" if name == "white" else "white"])[-1]


def job(seed: int, steps: int) -> Any:
    """Return what is trained."""
    from palestra import JobConfig

    optimizer = {"learning_rate": 5e-3, "schedule": "linear"}
    policy = {"model": "tiny-random", "max_context": 128, "optimizer": optimizer}
    return JobConfig.model_validate(
        {
            "name": f"gomoku-duels-{seed}",
            "seed": seed,
            "steps": steps,
            "policies": {"white": policy, "black": policy},
            "roles": {"agent": "white", "opponent": "black"},
            "rollout": {"groups_per_step": GROUPS, "group_size": 16},
            "algorithm": {"loss_agg_mode": "token-mean", "epochs": 2},
            "evaluation": {"every_steps": 0},
            "checkpoint": {"every_steps": EVERY, "keep": steps},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},
            "trainer": {"dtype": "float32", "threads": 1, "micro_batch_tokens": 1024},
        }
    )


def draw(found: dict[int, dict[str, Any]]) -> None:
    """Draw rewards against each other while they train, and of versions against a random player."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 7.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2 * len(found))
    middle, right = figure.add_subplot(grid[1, : len(found)]), figure.add_subplot(grid[1, len(found) :])
    for number, (seed, one) in enumerate(found.items()):
        own = figure.add_subplot(grid[0, 2 * number : 2 * number + 2])
        own.axhline(0.5, color="black", lw=0.8, ls=":")
        own.set(ylim=(0.2, 0.8), title=f"against each other, seed {seed}", ylabel="mean reward")
        for name, colour in COLOURS.items():
            label = name if number == 0 else None
            own.plot(range(1, len(one["train"][name]) + 1), one["train"][name], color=colour, lw=1.6, label=name)
            rows = [[0, *one["untrained"]], *one["against"][name]]
            elo = [one["elo"]["untrained"], *(one["elo"][f"{name}@{row[0]}"] for row in one["against"][name])]
            steps = [row[0] + (2 * number - 2 + (name == "black")) * 0.25 for row in rows]  # so that bars do not hide
            for axes, points in ((middle, [row[1:3] for row in rows]), (right, elo)):
                means, halves = [mean for mean, _ in points], [half for _, half in points]
                axes.errorbar(
                    steps, means, yerr=halves, color=colour, lw=1.3, elinewidth=0.8, capsize=2, alpha=0.85, label=label
                )
        own.legend(frameon=False, loc="upper left")
        style(own)
    middle.set(ylabel="mean reward", title="versions against random moves, all seeds")
    right.set(ylabel="Elo", title="versions among all versions of their seed")
    for axes in (middle, right):
        axes.legend(frameon=False)
        style(axes)
    figure.savefig(CURVES)


def style(axes: Any) -> None:
    """Give a plot the look of the others."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_xlabel("step")


def write(found: dict[int, dict[str, Any]], steps: int, folder: Path) -> None:
    """Write the part of the page."""
    from learning import machine, written

    MATRIX.write_bytes((folder / f"matrix-{min(found)}.png").read_bytes())
    lines = [
        ABOUT.format(steps=steps, groups=GROUPS, every=EVERY, games=GAMES),
        f"![rewards of white and black over steps]({CURVES.name})",
        "",
        "| seed | policy | against random moves: untrained | last version | against the other's last version | Elo: "
        "untrained | last version | training s |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for seed, one in found.items():
        for name in COLOURS:
            step, mean, half, other, other_half = one["against"][name][-1]
            first, last = one["elo"]["untrained"], one["elo"][f"{name}@{step}"]
            before = "{:.2f} ± {:.2f}".format(*one["untrained"])
            cells = f"{before} | {mean:.2f} ± {half:.2f} | {other:.2f} ± {other_half:.2f}"
            elo = f"{first[0]:+.0f} ± {first[1]:.0f} | {last[0]:+.0f} ± {last[1]:.0f}"
            lines.append(f"| {seed} | {name} | {cells} | {elo} | {one['seconds']:.0f} |")
    lines += [
        "",
        f"![matrix of versions, seed {min(found)}]({MATRIX.name})",
        "",
        f"`python bench/gomoku_duels.py --seeds {' '.join(map(str, found))} --steps {steps}`. Intervals of 95 %. Wall",
        f"seconds of the training, beside other work. Machine: {machine()}; {datetime.date.today()}.",
        "",
    ]
    PAGE.write_text(written(PAGE.read_text(), "gomoku duels", "\n".join(lines)))


if __name__ == "__main__":
    main()
