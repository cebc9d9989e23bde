"""One GRPO step, Palestra and TRL in turns, with the arithmetic floor beside them."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Part
from processes import HERE, ROOT, run_json, shown

from palestra.models.catalog import SMOLLM2, model_folder

TRL = ROOT / ".venv-peers" / "trl" / "bin" / "python"
# What Palestra asks of malloc itself (palestra/models/device.py), asked of TRL's process from outside.
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
TABLE = "One GRPO step: 8 prompts x 8 samples, 40 + 12 tokens, SmolLM2-135M, float32 weights, bf16 compute"
FLOOR = "Arithmetic floor of that step (weights x tokens at the measured rate of bf16 products)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A program that runs steps and prints a JSON line."""

    name: str
    command: tuple[object, ...]
    environment: dict[str, str]


def contestants(threads: int, quick: bool) -> list[Contestant]:
    """Palestra, and TRL with and without a kept heap where its environment is there."""
    ours, theirs = ("--steps", 3 if quick else 6), ("--steps", 2 if quick else 4)
    palestra = (sys.executable, HERE / "step_palestra.py", "--threads", threads, *ours)
    found = [Contestant(name="Palestra", command=palestra, environment={})]
    if TRL.exists():
        model = Path(model_folder(SMOLLM2))
        trl = (TRL, HERE / "peers" / "trl_step.py", "--model", model, "--threads", threads, *theirs)
        found.append(Contestant(name="TRL 1.16", command=trl, environment={}))
        found.append(Contestant(name="TRL 1.16, heap kept", command=trl, environment=KEPT_HEAP))
    return found


def run(part: Part, threads: int, quick: bool) -> None:
    """All contestants in turns, each round in another order, so that what disturbs the machine disturbs all."""
    field = contestants(threads, quick)
    if len(field) == 1:
        part.notes.append(f"TRL is skipped: {TRL.relative_to(ROOT)} is not there; bench/peers/README.md says how")
    results: dict[str, list[dict[str, Any]]] = {one.name: [] for one in field}
    for number in range(1 if quick else 2):
        for one in field if number % 2 == 0 else reversed(field):
            results[one.name].append(run_json(one.command, one.environment))
    ours = [step for result in results["Palestra"] for step in result["steps"]]
    for one in field:
        found, command = results[one.name], shown(one.command, one.environment)
        if one.name == "Palestra":
            add_palestra(part, command, found, ours)
        else:
            add_trl(part, one.name, command, found, statistics.median(step["total"] for step in ours))
    add_floor(part, shown(field[0].command), results["Palestra"], ours)
    part.notes.append(f"{threads} threads; every process began with a step that is not counted")


def add_palestra(part: Part, command: str, found: list[dict[str, Any]], steps: list[dict[str, float]]) -> None:
    """A row of seconds by piece."""
    pieces = ("generate", "forward_backward", "optimizer", "publish", "batch")
    columns = {f"{piece.replace('_', ' + ')}__s": [step[piece] for step in steps] for piece in pieces}
    total, peak = [step["total"] for step in steps], [result["peak_rss_mb"] for result in found]
    part.add(TABLE, "Palestra", command, step__s=total, **columns, peak__RSS__MiB=peak, steps__counted=[len(steps)])
    tokens = found[-1]["tokens"]
    part.notes.append(
        f"Palestra's forward and backward pass computes {tokens['computed']} tokens where rows one by one have "
        f"{tokens['flat']} ({tokens['trained']} are trained); its engine computes {tokens['prefilled']} prompt tokens"
    )


def add_trl(part: Part, name: str, command: str, found: list[dict[str, Any]], ours: float) -> None:
    """A row of what TRL tells, and how many times longer it takes."""
    total = [seconds for result in found for seconds in result["step_seconds"]]
    part.add(
        TABLE,
        name,
        command,
        step__s=total,
        generate__s=[result["generate_seconds"] for result in found if result["generate_seconds"]],
        peak__RSS__MiB=[result["peak_rss_mb"] for result in found],
        steps__counted=[len(total)],
        times__Palestra=[statistics.median(total) / ours],
    )


def add_floor(part: Part, command: str, found: list[dict[str, Any]], steps: list[dict[str, float]]) -> None:
    """What arithmetic alone would take, and what was taken."""
    floors = [result["floor"] for result in found]
    for shape in floors[0]["gflops_by_shape"]:
        rates = [floor["gflops_by_shape"][shape] for floor in floors]
        part.add(FLOOR, f"bf16 product {shape}", command, GFLOP_per_s=rates)
    rows = {
        "generate": ("generate_seconds", "generate"),
        "forward + backward, shared prompts once": ("train_seconds", "forward_backward"),
        "forward + backward, every row in full": ("flat_train_seconds", None),
    }
    for row, (key, piece) in rows.items():
        least = [floor[key] for floor in floors]
        taken = [step[piece] for step in steps] if piece else []
        times = [statistics.median(taken) / statistics.median(least)] if taken else []
        part.add(FLOOR, row, command, floor__s=least, Palestra__s=taken, times__the__floor=times)
