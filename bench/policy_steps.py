"""What two policies cost that share the episodes of a step, beside one policy that has them all: time and memory.

The work of sampling and of gradients depends on the number of tokens, so it is the same for one policy and for two. The
second policy adds what depends on weights: the optimizer's pass over them, their publication, and passes of the engine,
each of which is of one policy, so that a batch of 64 replies becomes two of 32. Bytes of a parameter: 4 its
weight, 8 its moments, 2 in the engine, of each policy; 4 its gradient, of the policy that is being trained.
"""

from __future__ import annotations

import statistics
import sys

from figures import Part
from processes import HERE, run_json, shown

TABLE = (
    "One GRPO step of 8 prompts x 8 samples, 40 + 12 tokens, SmolLM2-135M: all of one policy, or half of each of two"
)
LIMIT = 1.15  # times one policy's step
OF_EACH, OF_ONE = 14, 4  # bytes of a parameter of each policy, and of the one that is trained at a time


def run(part: Part, threads: int, quick: bool) -> None:
    """One and two in turns, each in processes of their own, so that what disturbs the machine disturbs both."""
    found: dict[int, list[dict]] = {1: [], 2: []}
    commands = {
        number: (
            *(sys.executable, HERE / "policy_steps_palestra.py"),
            *("--policies", number, "--threads", threads, "--steps", 3 if quick else 5),
        )
        for number in found
    }
    for turn in range(1 if quick else 3):
        for number in (1, 2) if turn % 2 == 0 else (2, 1):
            found[number].append(run_json(commands[number]))
    ours = statistics.median(step["total"] for result in found[1] for step in result["steps"])
    for number, results in found.items():
        steps = [step for result in results for step in result["steps"]]
        total = [step["total"] for step in steps]
        part.add(
            TABLE,
            f"{number} polic{'ies' if number > 1 else 'y'}",
            shown(commands[number]),
            step__s=total,
            **{f"{piece}__s": [step[piece] for step in steps] for piece in ("generate", "train", "publish")},
            times__one__policy=[statistics.median(total) / ours],
            peak__RSS__MiB=[result["peak_rss_mb"] for result in results],
            weights__and__moments__MiB=[_bytes(results[0]["parameters"], number) / 2**20],
        )
    part.notes.append(f"the step of two may take {LIMIT:g} times that of one; float32 weights, bf16 compute")


def _bytes(parameters: int, policies: int) -> int:
    """What weights, moments, a gradient and the engine's weights take."""
    return parameters * (OF_EACH * policies + OF_ONE)
