"""What a step of each algorithm, or with an adapter, costs beside another on the same rows."""

from __future__ import annotations

import statistics
import sys

from figures import Part
from processes import HERE, run_json, shown

TABLE = "The trainer's part of a step: 8 prompts x 8 samples, 40 + 12 tokens, SmolLM2-135M, by `algorithm`"
COMPARED = {  # what is measured, and beside what
    "grpo, entropy": "grpo",
    "grpo, kl": "grpo",
    "a2c": "grpo",
    "ppo": "grpo",
    "ppo, kl": "grpo",
    "grpo, adapter": "grpo",
    "grpo, kl, adapter": "grpo, adapter",
    "ppo, adapter": "grpo, adapter",
}
QUICK = ("ppo", "grpo, adapter", "grpo, kl, adapter")


def run(part: Part, threads: int, quick: bool) -> None:
    """Each in turns with another, in one process, so that what disturbs the machine disturbs both."""
    for name in QUICK if quick else COMPARED:
        beside = COMPARED[name]
        options = ("--threads", threads, "--steps", 4 if quick else 7, "--only", beside, name)
        command = (sys.executable, HERE / "algorithm_steps_palestra.py", *options)
        found = run_json(command)
        times = [statistics.median(found[name]) / statistics.median(found[beside])]
        row = f"{name} (beside {beside})"
        part.add(TABLE, row, shown(command), step__s=found[name], beside__s=found[beside], times=times)
    part.notes.append("float32 weights, bf16 compute; an adapter has rank 16 on all linear layers, its base is in bf16")
    part.notes.append("episodes are made up, and nothing is sampled or published")
