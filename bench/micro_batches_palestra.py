"""Times gradients of made-up rows with one size of micro-batches; prints one JSON line.

python bench/micro_batches_palestra.py ROWS PROMPT ANSWER GROUP MICRO_BATCH_TOKENS --threads 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from typing import Any

import numpy as np
from step_palestra import job_config

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.models.device import tune_malloc
from palestra.runtime.parts import build_parts
from palestra.trainer.base import PolicySpec
from palestra.types.records import TrainSample

TRAINED = 12  # tokens at the end of a row, at most
TIMES = 3  # the first is not counted


def rows(count: int, prompt: int, answer: int, group: int) -> list[TrainSample]:
    """Rows of random tokens; those of a group have the prompt in common."""
    draw = np.random.default_rng(0)
    found = []
    for number in range(count):
        if number % group == 0:
            shared = draw.integers(10, 40_000, prompt)
        ids = np.concatenate((shared, draw.integers(10, 40_000, answer))).astype(np.int32)
        mask = np.arange(len(ids)) >= len(ids) - min(answer, TRAINED)
        found.append(
            TrainSample(
                episode_id=f"row {number}",
                policy="policy",
                ids=ids,
                loss_mask=mask,
                logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
                versions=np.where(mask[:, None], 0, -1).astype(np.int32).repeat(2, axis=1),
                calls=np.where(mask, 0, -1).astype(np.int32),
                advantages=mask.astype(np.float32),
                loss_weights=(mask / (count * mask.sum())).astype(np.float32),
                temperatures=np.ones(len(ids), np.float32),
            )
        )
    return found


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each gradient but the first, the peak of memory, and the tokens that were computed."""
    config = job_config(arguments.threads)
    trainer = config.trainer.model_copy(update={"micro_batch_tokens": arguments.micro_batch_tokens})
    parts = build_parts(config.model_copy(update={"trainer": trainer}))
    assert parts.trainer is not None
    batch = rows(arguments.rows, arguments.prompt, arguments.answer, arguments.group)
    await parts.trainer.create("policy", PolicySpec(model=config.policies["policy"].model))
    loss = LossSpec.of(PPOClipLoss())
    wall, cpu = [], []
    for number in range(TIMES):
        begin, used = time.perf_counter(), time.process_time()
        report = await parts.trainer.forward_backward("policy", batch, loss, f"{number}")
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - used)
    await parts.trainer.close()
    await parts.engine.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"wall": wall[1:], "cpu": cpu[1:], "peak_rss_mib": peak, "computed": report.forward_tokens}


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rows", "prompt", "answer", "group", "micro_batch_tokens"):
        parser.add_argument(name, type=int)
    parser.add_argument("--threads", type=int, default=2)
    tune_malloc()
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
