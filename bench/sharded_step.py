"""Times gradient, update and publication with ranks of one thread each, in turns with one process of as many threads.

    python bench/sharded_step.py [--model NAME] [--ranks 2] [--rounds 3]

The rows are those of bench/step_palestra.py: 8 prompts of 40 tokens x 8 samples of 12, with made-up ids; float32
weights, bfloat16 compute. Both trainers are loaded the whole time, and take turns, so that what disturbs the machine
disturbs both; the first round is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import resource
import statistics
import time
from collections.abc import Sequence

from made_rows import POLICY, made_rows

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import SMOLLM2, TrainerConfig
from palestra.models.device import tune_malloc
from palestra.trainer.base import OptimParams, PolicySpec, Trainer
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.records import TrainSample
from palestra_sharded.trainer import ShardedTrainer

SHAPE = {"prompts": 8, "samples": 8, "prompt_tokens": 40, "new_tokens": 12}
PIECES = ("gradient", "update", "publish")
LOSS = LossSpec.of(PPOClipLoss())
MIB = 2**20


async def step(trainer: Trainer, number: int, rows: Sequence[TrainSample]) -> list[float]:
    """Return the seconds of the pieces of one step."""
    marks = [time.perf_counter()]
    await trainer.forward_backward(POLICY, rows, LOSS, f"gradient {number}")
    marks.append(time.perf_counter())
    await trainer.optim_step(POLICY, OptimParams(learning_rate=1e-6), f"update {number}")
    marks.append(time.perf_counter())
    for _ in (await trainer.weights(POLICY)).tensors():
        pass
    marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks)]


async def measure(model: str, ranks: int, rounds: int) -> dict[str, object]:
    """Return medians of the seconds of both, their ratio, and the memory of each process."""
    one = TorchTrainer(TrainerConfig(threads=ranks), 1)
    several = ShardedTrainer(TrainerConfig(threads=1, devices=ranks), 1, "bfloat16")
    trainers: dict[str, Trainer] = {f"1 x {ranks}": one, f"{ranks} x 1": several}
    taken: dict[str, list[list[float]]] = {name: [] for name in trainers}
    try:
        for trainer in trainers.values():
            await trainer.create(POLICY, PolicySpec(model=model))
        for number in range(rounds + 1):
            order = list(trainers) if number % 2 else list(reversed(trainers))
            for name in order:
                taken[name].append(await step(trainers[name], number, made_rows(number, **SHAPE)))
        memory = [size / MIB for size in await several.peak_bytes()]
    finally:
        for trainer in trainers.values():
            await trainer.close()
    counted = {name: steps[1:] for name, steps in taken.items()}
    medians = {
        name: dict(zip(PIECES, (statistics.median(column) for column in zip(*steps, strict=True)), strict=True))
        | {"step": statistics.median(map(sum, steps))}
        for name, steps in counted.items()
    }
    ratios = [sum(b) / sum(a) for a, b in zip(*counted.values(), strict=True)]
    return {
        "model": model,
        "processes x threads, seconds": medians,
        "steps": {name: [round(sum(each), 2) for each in steps] for name, steps in counted.items()},
        "ratio of steps": statistics.median(ratios),
        "peak MiB of the one process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak MiB of each rank": memory,
    }


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tune_malloc()
    print(json.dumps(asyncio.run(measure(arguments.model, arguments.ranks, arguments.rounds))))


if __name__ == "__main__":
    main()
