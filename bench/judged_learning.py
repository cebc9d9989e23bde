"""What a noisy judge and a curriculum are worth to models that learn.

    python bench/judged_learning.py words [--seeds 0 1 2] [--steps 30]
    python bench/judged_learning.py sums [--seeds 0 1 2] [--steps 12]
    python bench/judged_learning.py band [--seeds 0 1 2] [--steps 48]

Each part has two runs a seed. `words`: a tiny model says the word of its prompt, and `sums`: SmolLM2-135M adds, with an
exact reward and with a relative judge behind HTTP that has noise and prefers early places. `band`: the tiny model with
tasks of which 70 % are never solved and 15 % always, in plain order and with a curriculum. Each run is kept in
bench/results/learned-judged.json, and is not run again.
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

FILE = ROOT / "bench" / "results" / "learned-judged.json"
# Of the judge: the standard deviation, and what the first place is worth above the last. One ranking has a tau of 0.7:
# in `words` tau-b, of sums over pairs of a right and a wrong number, of which 85 % are in the right order.
NOISE, BIAS = {"words": 0.5, "sums": 0.335}, 0.3
GOAL = 0.7
WORDS = ("red", "green", "blue", "none")
RIGHT = "validation/rewards/right"
STEPS = {"words": 30, "sums": 12, "band": 48}
PARTS = {"words": ("exact", "judge"), "sums": ("exact", "judge"), "band": ("plain", "band")}


def quality(question: str, answer: str) -> float:
    """Return what the judge looks for: 1 for what is right and nothing else; of sums 0.5 for another number alone."""
    if question.startswith("Say"):
        return float(answer == question[4:].partition(":")[0])
    a, b = map(int, re.findall(r"\d+", question))
    if not re.fullmatch(r"\s*\d+\.?\s*", answer):
        return 0.0
    return 1.0 if int(re.findall(r"\d+", answer)[0]) == a + b else 0.5


def seen(asked: Asked) -> str:
    """Rank the replies as the judge sees them."""
    question = asked.data["question"]
    return asked.rank(partial(quality, question), BIAS, NOISE["words" if question.startswith("Say") else "sums"])


def score(task: dict[str, Any], answer: str, finish_reason: str = "stop") -> dict[str, float]:
    """Return whether the answer is right, and what a judge without noise would think of it."""
    if "words" in task:
        return {"right": float(answer in task["words"]), "quality": float(answer in task["words"])}
    return {"right": addition.reward(task, answer, finish_reason), "quality": quality(task["prompt"], answer)}


def sums(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the recipe's sums with their questions."""
    return [{**row, "prompt": f"{row['a']} + {row['b']} ="} for row in rows]


def words(first: int, said: int, always: int = 0, never: int = 0) -> list[dict[str, Any]]:
    """Return tasks to say the word of the prompt, and tasks of which any word is right, and none."""
    made = [(f"Say {(word := WORDS[n % 3])}: {n}", [word]) for n in range(first, first + said)]
    made += [(f"A mood, {n}", list(WORDS)) for n in range(always)] + [(f"A riddle, {n}", []) for n in range(never)]
    return [{"id": prompt, "prompt": prompt, "words": right} for prompt, right in made]


def sums_job(seed: int, steps: int) -> dict[str, Any]:
    """Return the recipe's job: what `palestra.train` takes, its configuration as a dictionary."""
    plain = addition.job(seed, steps).model_dump(mode="json", exclude_none=True, exclude_unset=True)
    plain |= {"environment": {"system": addition.SYSTEM}, "rollout": {"groups_per_step": 12, "group_size": 6}}
    plain["policies"]["calculator"]["sampling"] = {"max_tokens": 12}
    training, validation = (sums(rows) for rows in addition.sums())
    return {"reward": score, "tasks": training, "validation_tasks": validation, "config": plain}


def words_job(seed: int, steps: int, kind: str) -> dict[str, Any]:
    """Return a job of a tiny model: what `palestra.train` takes, its configuration as a dictionary."""
    several = kind in PARTS["band"]
    optimizer = {"learning_rate": 1e-3, "schedule": "constant" if several else "linear"}
    plain: dict[str, Any] = {
        "seed": seed,
        "steps": steps,
        "policies": {"speaker": {"model": "tiny-random", "max_context": 128, "optimizer": optimizer}},
        "rollout": {"groups_per_step": 16 if several else 8, "group_size": 8},
        "engine": {"dtype": "float32", "threads": 1},
        "trainer": {"dtype": "float32", "threads": 1},
    }
    if kind == "band":
        plain["curriculum"] = {"min_reward": 1.0}
    play = palestra.RolloutSpec(
        environment=lambda: palestra.TaskEnvironment(score),
        agents={"agent": palestra.ModelAgent(choices=WORDS, max_tokens=16)},
    )
    training = words(0, 30, always=30, never=140) if several else words(0, 30)
    return {"rollout": play, "tasks": training, "validation_tasks": words(600, 48), "config": plain}


def train(part: str, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one run, and return what is kept of it."""
    folder = UNFINISHED / f"judged-{part}-{kind}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    job = sums_job(seed, steps) if part == "sums" else words_job(seed, steps, kind)
    weights = {"right": float(kind != "judge"), "quality": 0.0}
    with judging(seen) as server:
        if kind == "judge":
            question = "Which reply is right, and nothing else?"
            job["config"]["judge"] = Relative(url=server.url, model="judge", instructions=question, orders=8)
            weights["rank"] = 1.0
        job["config"] |= {"run_dir": str(folder), "evaluation": {"every_steps": 3}}
        job["config"]["algorithm"] = {"reward_weights": weights}
        if kind == "judge":  # a group weighs as much as the orders of its replies agree
            job["config"]["algorithm"]["advantage_scale"] = "none"
        job["config"] = palestra.JobConfig.model_validate(job["config"])
        done = palestra.train(**job, quiet=True)
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
    """Return a row a seed."""
    lines = []
    for seed in seeds:
        one, other = (kept[f"{part} {kind} {seed}"] for kind in PARTS[part])
        (start, end), (first, last) = ((run["right"][0][1], run["right"][-1][1]) for run in (one, other))
        row = f"seed {seed}: {PARTS[part][0]} {start:.2f} to {end:.2f}, {PARTS[part][1]} {first:.2f} to {last:.2f}"
        if part == "band":
            most = max(right for _, right, _ in one["right"])
            plain, band = (
                next((tokens for _, right, tokens in run["right"] if right >= most), math.inf) for run in (one, other)
            )
            row += f"; first at {most:.2f} with {band / plain:.2f} of the tokens (goal 0.6)"
            row += f"; informative {one['informative']:.2f} and {other['informative']:.2f}"
        else:
            share = (last - first) / (end - start) if end > start else math.nan
            row += f", {share:.0%} of the gain (goal {GOAL:.0%}); tau of the averaged ranks {other['tau']:.2f}"
        lines.append(row)
    return lines


def runs() -> dict[str, Any]:
    """Return what is kept, by run."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def main() -> None:
    """Train what is missing, one run after another."""
    parser = argparse.ArgumentParser(description="Learning with a noisy judge, and with a curriculum.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", help="of the runs of the part; None: all, and what they show")
    parser.add_argument("--steps", type=int, help="None: 30, 12 of sums, 48 with a curriculum")
    arguments = parser.parse_args()
    part = arguments.part
    for seed, kind in itertools.product(arguments.seeds, arguments.kinds or PARTS[part]):
        if (cell := f"{part} {kind} {seed}") not in (kept := runs()):
            found = train(part, kind, seed, arguments.steps or STEPS[part])
            kept = {**runs(), cell: found}  # another process may have kept a run in the meantime
            FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        sys.stdout.write(f"{cell}: {kept[cell]['right'][-1]}, {kept[cell]['seconds']} s\n")
        sys.stdout.flush()
    if not arguments.kinds:
        sys.stdout.write("\n".join(report(part, runs(), arguments.seeds)) + "\n")


if __name__ == "__main__":
    main()
