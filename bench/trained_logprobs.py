"""What it costs a step of SmolLM2-135M to record each token's logprob when it was trained.

    python bench/trained_logprobs.py --threads 2 --steps 3

A step is that of bench/step.py: 64 episodes of 40 + 12 tokens. What recording adds is timed by itself, being far
below the differences from step to step: the rows of logprobs, their calls, and the commit to a run store on this disk.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from step_palestra import Bench, job_config

from palestra.config import RolloutConfig
from palestra.learner.reporting import trained_calls
from palestra.models.device import tune_malloc
from palestra.store import RunStore, open_run_store
from palestra.trainer.base import PolicySpec
from palestra.trainer.gradient import numbers_by_row
from palestra.trainer.packing import pack
from palestra.types.records import TrainSample


async def record(store: RunStore, step: int, rows: list[TrainSample], micro_batch_tokens: int) -> float:
    """Return the seconds of what a step does more when it records."""
    micro_batches = pack(rows, micro_batch_tokens)
    found = [torch.randn(sum(int(row.loss_mask.sum()) for row, _, _ in micro.samples)) for micro in micro_batches]
    started = time.perf_counter()
    logprobs = [
        row for micro, values in zip(micro_batches, found, strict=True) for row in numbers_by_row(micro, values)
    ]
    calls = await asyncio.to_thread(trained_calls, zip(rows, logprobs, strict=True))
    await store.trained.record(step, calls)
    return time.perf_counter() - started


async def measure(threads: int, steps: int) -> None:
    """Make the steps, and print a line."""
    config = job_config(threads)
    bench, name = Bench(config, seed=0), config.players.default
    await bench.parts.trainer.create(name, PolicySpec(model=config.policies[name].model))
    await bench.parts.engine.resume()
    rows: list[TrainSample] = []
    really = bench.parts.trainer.forward_backward

    async def seen(policy: str, batch: list[TrainSample], *given: object) -> object:
        rows[:] = batch
        return await really(policy, batch, *given)  # type: ignore[arg-type]

    bench.parts.trainer.forward_backward = seen  # type: ignore[method-assign, assignment]
    recorded = []
    with tempfile.TemporaryDirectory() as folder:
        with open_run_store(Path(folder) / "run.db", RolloutConfig()) as store:
            for number in range(steps + 1):  # the first warms up
                await bench.step(number)
                recorded.append(await record(store, number, rows, config.trainer.micro_batch_tokens or 4096))
        size = (Path(folder) / "run.db").stat().st_size
    await bench.parts.engine.close()
    await bench.parts.trainer.close()
    step = statistics.median(taken["total"] for taken in bench.steps[1:])
    more = statistics.median(recorded[1:])
    tokens = int(np.sum([row.loss_mask.sum() for row in rows]))
    print(
        f"step {step:.2f} s, recording {more * 1000:.1f} ms: {more / step:.3%} "
        f"({tokens} trained tokens a step, {size / 1024:.0f} KiB on disk after {len(recorded)} steps)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    tune_malloc()
    asyncio.run(measure(arguments.threads, arguments.steps))
