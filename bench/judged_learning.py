"""What a noisy judge and a curriculum are worth to models that learn.

    python bench/judged_learning.py judge [--seeds 0 1 2] [--steps 12]
    python bench/judged_learning.py band [--seeds 0 1 2] [--steps 48]

`judge` has SmolLM2-135M learn the recipe's sums twice, of which each reply is one of the numbers from 2 to 40: with the
exact reward, and with a relative judge behind HTTP that has noise and prefers early places.
`band` has a tiny model say words: 70 % of the tasks are never solved and 15 % always; they are played in plain order
and with a curriculum. Each run is kept in bench/results/learned-PART.json, and is not run again.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import sqlalchemy as sa
from learning import UNFINISHED, machine
from learning_outcomes import ROOT

import palestra
from palestra.store.browsing import browse
from palestra_judges import Relative
from palestra_judges.check import tau_b

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))
from judge_server import Asked, judging

from recipes import addition

KEPT = ROOT / "bench" / "results"
NOISE, BIAS = 0.45, 0.3  # of the judge: the standard deviation, and what the first place is worth above the last
GOAL, TAU = 0.7, 0.7
WORDS, LEARNING_RATE = ("red", "green", "blue", "none"), 1e-3
SHOWN = [
    (role, text)
    for a, b in ((3, 24), (21, 6), (25, 11))
    for role, text in (("user", f"{a} + {b} ="), ("assistant", f"{a + b}"))
]
NUMBERS = tuple(map(str, range(2, 41)))
RIGHT = "validation/rewards/right"
STEPS = {"judge": 12, "band": 48}
PARTS = {"judge": ("exact", "judge"), "band": ("plain", "band")}


def quality(question: str, answer: str) -> float:
    """Return what the judge looks for: 1 for the sum, and the less the farther off a number is."""
    a, b = map(int, re.findall(r"\d+", question))
    return 1 / (1 + abs(int(answer) - a - b))


def seen(asked: Asked) -> str:
    """Rank the replies as the judge sees them: by the place of each quality among those that differ, from 0 to 1."""
    values = {
        text: quality(asked.data["question"], text) for text in (one["reply"]["text"] for one in asked.data["replies"])
    }
    places = sorted(set(values.values()))
    return asked.rank(lambda text: places.index(values[text]) / max(len(places) - 1, 1), BIAS, NOISE)


def score(task: dict[str, Any], answer: str) -> dict[str, float]:
    """Return whether the answer is right, and what a judge without noise would think of it."""
    if "words" in task:
        return {"right": float(answer in task["words"])}
    return {"right": float(int(answer) == task["a"] + task["b"]), "quality": quality(task["prompt"], answer)}


def asked(task: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the question of a task, behind examples of a sum."""
    said = [("user", task["prompt"])]
    if "a" in task:
        said = [("system", addition.SYSTEM), *SHOWN, *said]
    return [{"role": role, "content": text} for role, text in said]


def sums(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the recipe's sums with their questions."""
    return [{**row, "prompt": f"{row['a']} + {row['b']} ="} for row in rows]


def words(first: int, said: int, always: int = 0, never: int = 0) -> list[dict[str, Any]]:
    """Return tasks to say the word of the prompt, and tasks of which any word is right, and none."""
    made = [(f"Say {(word := WORDS[n % 3])}: {n}", [word]) for n in range(first, first + said)]
    made += [(f"A mood, {n}", list(WORDS)) for n in range(always)] + [(f"A riddle, {n}", []) for n in range(never)]
    return [{"id": prompt, "prompt": prompt, "words": right} for prompt, right in made]


def sums_job(folder: Path, kind: str, seed: int, steps: int, judge: Relative) -> dict[str, Any]:
    """Return the recipe's job with another reward: what `palestra.train` takes."""
    plain = addition.job(seed, steps).model_dump(mode="json", exclude_none=True, exclude_unset=True)
    judged = kind == "judge"
    plain |= {
        "run_dir": str(folder),
        "evaluation": {"every_steps": 4},
        "rollout": {"groups_per_step": 12, "group_size": 6},
        "algorithm": {
            "reward_weights": {"right": float(not judged), "quality": 0.0} | ({"rank": 1.0} if judged else {})
        },
        "judge": judge if judged else None,
    }
    training, validation = (sums(rows) for rows in addition.sums())
    return {"rollout": played(NUMBERS), "tasks": training, "validation_tasks": validation, "config": made(plain)}


def words_job(folder: Path, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """Return a job of a tiny model, 15 % of whose tasks can be learned: what `palestra.train` takes."""
    plain = {
        "run_dir": str(folder),
        "seed": seed,
        "steps": steps,
        "curriculum": {"min_reward": 1.0} if kind == "band" else None,
        "policies": {
            "speaker": {"model": "tiny-random", "max_context": 128, "optimizer": {"learning_rate": LEARNING_RATE}}
        },
        "rollout": {"groups_per_step": 16, "group_size": 8},
        "algorithm": {"reward_weights": {"right": 1.0}},
        "evaluation": {"every_steps": 3},
        "engine": {"dtype": "float32", "threads": 1},
        "trainer": {"dtype": "float32", "threads": 1},
    }
    training, validation = words(0, 30, always=30, never=140), words(600, 48)
    return {"rollout": played(WORDS), "tasks": training, "validation_tasks": validation, "config": made(plain)}


def played(choices: Sequence[str]) -> palestra.RolloutSpec:
    """Return how tasks are played: with one reply, which is one of the choices."""
    return palestra.RolloutSpec(
        environment=lambda: palestra.TaskEnvironment(score, asked),
        agents={"agent": palestra.ModelAgent(choices=choices, max_tokens=16)},
    )


def made(plain: dict[str, Any]) -> palestra.JobConfig:
    """Return a configuration."""
    return palestra.JobConfig.model_validate(plain)


def train(cell: str, steps: int) -> dict[str, Any]:
    """Train one run, and return what is kept of it."""
    kind, seed = cell.split("-")[0], int(cell.split("-")[1])
    folder = UNFINISHED / f"judged-{cell}"
    shutil.rmtree(folder, ignore_errors=True)
    with judging(seen) as server:
        judge = Relative(url=server.url, model="judge", question="Which reply is nearest to the sum?")
        job = words_job if kind in PARTS["band"] else partial(sums_job, judge=judge)
        done = palestra.train(**job(folder, kind, seed, steps), quiet=True)
    groups = groups_of(folder)
    found = {
        "steps": steps,
        "right": [
            [row["step"], row[RIGHT], row.get("rollout/sampled_tokens", 0.0)] for row in done.metrics if RIGHT in row
        ],
        "sampled": [round(row["train/rewards/right"], 3) for row in done.metrics if "train/rewards/right" in row],
        "informative": fmean(len({one["right"] for one in group}) > 1 for group in groups),
        "seconds": round(done.metrics[-1]["wall_seconds"]),
        "tau": agreement(groups) if kind == "judge" else None,
        "load": round(os.getloadavg()[1], 1),
        "machine": machine(),
        "day": str(datetime.date.today()),
    }
    shutil.rmtree(folder)
    return found


def groups_of(run: Path) -> list[list[dict[str, float]]]:
    """Return the named rewards of the training episodes of each group."""
    with browse(run / "run.db") as connection:
        query = "SELECT group_index, named_rewards FROM episodes WHERE kind = 'train' AND state = 'completed'"
        rows = connection.execute(sa.text(query)).all()
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for index, named in rows:
        found[index].append(json.loads(named))
    return list(found.values())


def agreement(groups: list[list[dict[str, float]]]) -> float:
    """Return the mean tau-b of the judge's ranks with what it looks for, over the groups in which both differ."""
    taus = (tau_b([one["quality"] for one in group], [one["rank"] for one in group]) for group in groups)
    return fmean(tau for tau in taus if math.isfinite(tau))


def report(part: str, kept: dict[str, Any], seeds: list[int]) -> list[str]:
    """Return a row a seed, of those of which both runs are there."""
    first, second = PARTS[part]
    lines = []
    for seed in seeds:
        if not (f"{first}-{seed}" in kept and f"{second}-{seed}" in kept):
            continue
        one, other = kept[f"{first}-{seed}"], kept[f"{second}-{seed}"]
        start, end = one["right"][0][1], one["right"][-1][1]
        row = f"seed {seed}: {first} {start:.2f} to {end:.2f}, {second} {other['right'][0][1]:.2f} to "
        row += f"{other['right'][-1][1]:.2f}"
        if part == "judge":
            share = (other["right"][-1][1] - other["right"][0][1]) / (end - start)
            row += f", {share:.0%} of the gain (goal {GOAL:.0%}); tau {other['tau']:.2f} (goal {TAU})"
        else:
            most = max(right for _, right, _ in one["right"])
            plain, band = (
                next((tokens for _, right, tokens in run["right"] if right >= most), math.inf) for run in (one, other)
            )
            row += f"; first at {most:.2f} with {band / plain:.2f} of the tokens (goal 0.6)"
            row += f"; informative {one['informative']:.2f} and {other['informative']:.2f}"
        lines.append(row)
    return lines


def main() -> None:
    """Train what is missing, one run after another."""
    parser = argparse.ArgumentParser(description="Learning with a noisy judge, and with a curriculum.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="None: 12 with a judge, 48 with a curriculum")
    arguments = parser.parse_args()
    file, steps = KEPT / f"learned-{arguments.part}.json", arguments.steps or STEPS[arguments.part]
    for seed, kind in itertools.product(arguments.seeds, PARTS[arguments.part]):
        kept = json.loads(file.read_text()) if file.is_file() else {}
        if (cell := f"{kind}-{seed}") not in kept:
            kept[cell] = train(cell, steps)
            file.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        sys.stdout.write(f"{cell}: {kept[cell]['right']}, {kept[cell]['seconds']} s\n")
        sys.stdout.flush()
    sys.stdout.write("\n".join(report(arguments.part, kept, arguments.seeds)) + "\n")


if __name__ == "__main__":
    main()
