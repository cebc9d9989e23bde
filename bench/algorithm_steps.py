"""What a step of each algorithm costs beside one of GRPO on the same rows: forward passes, gradients, updates."""

from __future__ import annotations

import statistics
import sys

from figures import Part
from processes import HERE, run_json, shown

TABLE = "The trainer's part of a step: 8 prompts x 8 samples, 40 + 12 tokens, SmolLM2-135M, by `algorithm`"
COMPARED = ("grpo, entropy", "grpo, kl", "a2c", "ppo", "ppo, kl")


def run(part: Part, threads: int, quick: bool) -> None:
    """Each in turns with GRPO, in one process, so that what disturbs the machine disturbs both."""
    for name in COMPARED[3:4] if quick else COMPARED:
        options = ("--threads", threads, "--steps", 4 if quick else 7, "--only", "grpo", name)
        command = (sys.executable, HERE / "algorithm_steps_palestra.py", *options)
        found = run_json(command)
        times = [statistics.median(found[name]) / statistics.median(found["grpo"])]
        part.add(TABLE, name, shown(command), step__s=found[name], grpo__s=found["grpo"], times__grpo=times)
    part.notes.append("float32 weights, bf16 compute; episodes are made up, and nothing is sampled or published")
