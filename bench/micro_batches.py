"""How large a micro-batch should be: time and memory of a gradient, for answers to long and to short prompts."""

from __future__ import annotations

import sys

from figures import Part
from processes import HERE, run_json, shown

TABLE = "Gradient of {} rows of {} + {} tokens in groups of {}, by `trainer.micro_batch_tokens`"
SHAPES = ((32, 180, 70, 32), (96, 40, 12, 6), (24, 900, 50, 24))  # rows, prompt, answer, group
SIZES = (4096, 2048, 1024, 512)


def run(part: Part, threads: int, quick: bool) -> None:
    """Each size in a process of its own, so that its peak of memory is its own."""
    for shape in SHAPES[:1] if quick else SHAPES:
        for size in SIZES:
            options = [str(number) for number in (*shape, size)]
            command = (sys.executable, HERE / "micro_batches_palestra.py", *options, "--threads", threads)
            found = run_json(command)
            part.add(
                TABLE.format(*shape),
                f"{size:,}",
                shown(command),
                gradient__s=found["wall"],
                CPU__s=found["cpu"],
                peak__RSS__MiB=[found["peak_rss_mib"]],
                tokens__computed=[found["computed"]],
            )
    part.notes.append("SmolLM2-135M, float32 weights, bf16 compute; the engine's weights are in memory, too")
