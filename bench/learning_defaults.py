"""Whether the default settings learn, and keep what was learned: a table in docs/learning.md.

    python bench/learning_defaults.py --qwen FOLDER --only SmolLM2-lora-sums-0 Qwen-lora

Two models, all weights and an adapter of rank 16, three tasks, three seeds: 36 cells of 100 steps of 4 groups of 8
replies, each in a process of its own, with the optimizer, the algorithm and the adapter that a job has if nothing is
said of them. `--only` chooses cells by the beginnings of their names; a cell that was stopped continues from its
newest checkpoint. `--set KEY=VALUE` tries other settings, which are kept and printed apart and never enter the page.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learning import PAGE, PATIENT, UNFINISHED, machine, written
from learning_outcomes import ROOT

import palestra
from palestra.cli.options import overrides
from palestra.config.loading import parse_config

sys.path.insert(0, str(ROOT))
from recipes import addition

STEPS, GOAL, NEAR = 100, 0.8, 0.05
HELD_OUT = 40
MODELS = ("Qwen", "SmolLM2")
KINDS = {"all": None, "lora": {"rank": 16}}
FILE = ROOT / "bench" / "results" / "learned-defaults.json"
# Data set of reasoning-gym, or the recipe's, and its settings; system message; most tokens of a reply.
TASKS: dict[str, tuple[str, dict[str, int], str, int]] = {
    "pairs": ("addition", {}, addition.SYSTEM, 12),
    "sums": (
        "chain_sum",
        {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2},
        "Work in short lines, then the number alone on the last line. Example: 12 + 30 - 5 =\n12 + 30 = 42\n"
        "42 - 5 = 37\n37",
        64,
    ),
    "words": (
        "gsm_symbolic",
        {},
        "Reason in at most four short sentences with the calculations. No code, no LaTeX. Then write the final number "
        "alone on the last line.",
        180,
    ),
}


def reward(task: dict[str, Any], answer: str, finish_reason: str) -> float:
    """Return 1 if the reply ends by itself and the last number of its last line is right, else 0."""
    last = re.findall(r"-?\d+(?:\.\d+)?", (answer.strip().splitlines() or [""])[-1])[-1:]
    return float(finish_reason == "stop" and [*map(float, last)] == [float(task["answer"])])


def tasks(name: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return (training, validation): questions that differ, of which some are held out."""
    import reasoning_gym

    dataset, settings, _, _ = TASKS[name]
    if dataset == "addition":
        training, validation = (
            [
                {"id": one["id"], "prompt": f"{one['a']} + {one['b']} =", "answer": str(one["a"] + one["b"])}
                for one in part
            ]
            for part in addition.sums()
        )
        return training, validation[:HELD_OUT]
    made = reasoning_gym.create_dataset(dataset, size=1000, seed=5, **settings)
    found = {
        re.sub(r"^State the final answer.*?: | Give the result as.*$", "", e["question"]): e["answer"] for e in made
    }
    rows = [
        {"id": f"{name}-{i}", "prompt": prompt, "answer": answer} for i, (prompt, answer) in enumerate(found.items())
    ]
    random.Random(0).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def job(cell: str, model: str, steps: int, changes: Sequence[str]) -> palestra.JobConfig:
    """Return a cell's configuration: defaults, but for what the task is and how large a step."""
    _, kind, task, seed = cell.split("-")
    _, _, system, longest = TASKS[task]
    policy = {"model": model, "max_context": 512, "sampling": {"max_tokens": longest}, "adapter": KINDS[kind]}
    plain: dict[str, Any] = {
        "name": "defaults",
        "seed": int(seed),
        "steps": steps,
        "policies": {"policy": policy},
        "rollout": {"groups_per_step": 4, "group_size": 8},
        "environment": {"system": system},
    }
    return parse_config(plain, overrides(changes))


def play(key: str, cell: str, model: str, steps: int, changes: Sequence[str]) -> dict[str, Any]:
    """Train one cell in a process of its own, or go on with it, and return what is kept of it."""
    folder = UNFINISHED / key.replace(" ", "_").replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--cell", cell, "--model", model, "--steps", str(steps)]
    command += [word for change in changes for word in ("--set", change)]
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | PATIENT, stdout=output)
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status:
        raise SystemExit(f"{key} failed; {folder / 'output.txt'} says more")
    rows = [json.loads(line) for line in (folder / "runs/defaults/metrics.jsonl").read_text().splitlines()]
    optimizer = job(cell, model, steps, changes).policies["policy"].optimizer
    return {
        "steps": steps,
        "optimizer": f"{optimizer.learning_rate:g} {optimizer.schedule}",
        "validation": [[r["step"], r["validation/reward_mean"], round(r["wall_seconds"])] for r in rows if SCORE in r],
        "reward": [round(r["train/reward_mean"], 3) for r in rows if "train/reward_mean" in r],
        "entropy": [round(r["train/entropy"], 3) for r in rows if "train/entropy" in r],
        "grad_norm": [round(r["train/grad_norm"], 3) for r in rows if "train/grad_norm" in r],
        "load": round(os.getloadavg()[1], 1),
        "machine": machine(),
        "day": str(datetime.date.today()),
    }


def results() -> dict[str, Any]:
    """Return what is kept of the cells that were trained."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


SCORE = "validation/reward_mean"


def part(kept: dict[str, Any]) -> str:
    """What docs/learning.md says: a row a cell that has been trained to the end with the defaults."""
    rows, good = [], 0
    for cell, found in kept.items():
        if " " in cell:
            continue
        scores = [score for _, score, _ in found["validation"]]
        first = next(((step, seconds) for step, score, seconds in found["validation"] if score >= GOAL), ("–", "–"))
        good += round(max(scores) - scores[-1], 6) <= NEAR
        model, kind, task, seed = cell.split("-")
        rows.append(
            f"| {model} | {kind} | {task} | {seed} | {found['optimizer']} | {scores[0]:.2f} | {max(scores):.2f} | "
            f"{scores[-1]:.2f} | {max(scores) - scores[-1]:.2f} | {first[0]} | {first[1]} | {found['load']} |"
        )
    days = ", ".join(sorted({found["day"] for found in kept.values()}))
    return "\n".join(
        [
            "## Default settings",
            "",
            "`bench/learning_defaults.py`: 100 steps of 4 groups x 8 replies, GRPO, optimizer and adapter (rank 16) as",
            f"by default; {HELD_OUT} held-out tasks, greedily, every 5 steps. A reply counts if it ends by itself and",
            "the last number of its last line is right.",
            "",
            f"Trained so far: {len(rows)} of 36 runs, of which {good} end within {NEAR} of their best.",
            "",
            f"| model | weights | task | seed | rate | untrained | best | end | difference | steps to {GOAL} "
            f"| s to {GOAL} | load |",
            "|---|---|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
            *rows,
            "",
            f"Seconds since the start of the job, with evaluations. Machine: {machine()}; {days}.",
            "",
        ]
    )


def main() -> None:
    """Train the chosen cells, one after another; each result is kept and printed as it comes."""
    parser = argparse.ArgumentParser(description="Do the default settings learn?")
    parser.add_argument("--qwen", default="Qwen2.5-Coder-0.5B-Instruct", help="folder of Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of cells' names, MODEL-WEIGHTS-TASK-SEED")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting, to try it")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        training, validation = tasks(arguments.cell.split("-")[2])
        config = job(arguments.cell, arguments.model, arguments.steps, arguments.set)
        resume = any(Path("runs/defaults/checkpoints").glob("*"))
        palestra.train(reward=reward, tasks=training, config=config, validation_tasks=validation, resume=resume)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of the cell is ended, too
    models = {"Qwen": str(Path(arguments.qwen).resolve()), "SmolLM2": "SmolLM2-135M-Instruct"}
    for words in itertools.product(MODELS, KINDS, TASKS, "012"):
        cell = "-".join(words)
        changed = [*arguments.set, *([f"steps={arguments.steps}"] if arguments.steps != STEPS else [])]
        key = " ".join([cell, *changed])
        if not cell.startswith(tuple(arguments.only)) or key in results():
            continue
        found = play(key, cell, models[words[0]], arguments.steps, arguments.set)
        print(key, found["validation"], flush=True)
        kept = dict(sorted((results() | {key: found}).items()))  # read again: others may train other cells meanwhile
        FILE.write_text(re.sub(r"\n {3,}|\n  (?=\])", " ", json.dumps(kept, indent=1)) + "\n")
        PAGE.write_text(written(PAGE.read_text(), "defaults", part(kept)))


if __name__ == "__main__":
    main()
