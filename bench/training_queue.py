"""How long a step of a small tenant takes beside one that has ten times as much always queued; prints a table.

    python bench/training_queue.py --threads 1 --cpu [--tokens 144,1024] [--draw docs/training-queue.png]

SmolLM2-135M, an adapter of rank 16 each. The small tenant's step has 8 rows, a prompt of 40 tokens with 8 replies of
12, and it samples between two steps for 0.5 to 1.5 times as long as one takes alone (it sleeps). The other's has 80
rows, and two of its steps are in the queue at any time. Three orders: the small tenant alone, deficit round robin, and
first come first served; and deficit round robin beside a small tenant that does not sample, which asks for its share.
With `--cpu` seconds are those of the processor, which neighbours on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
from adapters import LORA, LOSS, UPDATE, Clock, rows

from palestra.config import SMOLLM2, TrainerConfig
from palestra.models.device import tune_malloc
from palestra.models.loading import LoadedModels
from palestra.trainer.base import PolicySpec
from palestra_bases.training.queue import QUANTUM_PASSES, TrainingQueue
from palestra_bases.training.shared_trainer import SharedTrainer
from palestra_bases.training.shares import FairShares
from palestra_bases.training.tenant_trainer import TenantTrainer

Steps = dict[str, list[float]]
ALONE, FAIR, FIFO = "alone", "deficit round robin", "first come first served"
RESTLESS = "deficit round robin, no sampling"


class FirstCome(FairShares):
    """Serves the tenant that has waited longest until its request is over, and merges nothing."""

    def choose(self, waiting: Sequence[str]) -> str:
        """Return the tenant of the oldest request."""
        return waiting[0]

    def may_use(self, tenant: str) -> bool:
        """Let no tenant join the pass of another."""
        return False


async def measure(threads: int, clock: Clock, tokens: int, order: str, steps: int) -> list[float]:
    """Return the seconds of the small tenant's steps.

    Args:
        threads: of the trainer.
        clock: seconds.
        tokens: most of one pass.
        order: in which requests are served.
        steps: how many are measured.
    """
    trainer = SharedTrainer(TrainerConfig(threads=threads, micro_batch_tokens=tokens), 2, LoadedModels())
    kind = FirstCome if order == FIFO else FairShares
    queue = TrainingQueue(trainer, kind(QUANTUM_PASSES * tokens))
    small, large = (TenantTrainer(queue, name) for name in ("small", "large"))
    for seed, (name, tenant) in enumerate((("small", small), ("large", large))):
        queue.add_tenant(name)
        await tenant.create("p", PolicySpec(model=SMOLLM2, adapter=LORA, seed=seed))
    ids, draw = count(), np.random.default_rng(0)

    async def step(tenant: TenantTrainer, groups: int) -> float:
        mark = next(ids)
        batch = rows(np.random.default_rng(mark), groups, 8, 40, 12)
        begin = clock()
        await tenant.forward_backward("p", batch, LOSS, f"g{mark}")
        await tenant.optim_step("p", UPDATE, f"u{mark}")
        return clock() - begin

    async def always() -> None:
        while True:
            await step(large, 10)

    await step(small, 1)
    usual = await step(small, 1)
    neighbours = [] if order == ALONE else [asyncio.create_task(always()) for _ in range(2)]
    found = list[float]()
    for _ in range(steps):
        await asyncio.sleep(0 if order == RESTLESS else draw.uniform(0.5, 1.5) * usual)
        found.append(await step(small, 1))
    for task in neighbours:
        task.cancel()
    await asyncio.gather(*neighbours, return_exceptions=True)
    await queue.remove_tenant("large")
    await queue.close()
    return found


def show(tokens: int, order: str, seconds: list[float], alone: float) -> None:
    """Print a row."""
    p50, p95 = np.percentile(seconds, (50, 95))
    print(f"| {tokens} | {order} | {len(seconds)} | {p50:.3g} | {p95:.3g} | {p95 / alone:.2f} |", flush=True)


def draw_curves(found: dict[int, Steps], file: Path) -> None:
    """Draw, for each order, the share of the small tenant's steps that took at most so long."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for tokens, steps in found.items():
        for order, seconds in steps.items():
            share = np.arange(1, len(seconds) + 1) / len(seconds)
            axes.step(sorted(seconds), share, where="post", label=f"{order}, passes of {tokens}")
    axes.set_xscale("log")
    axes.set_xlabel("seconds of a step of 8 rows")
    axes.set_ylabel("share of steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each size of passes; first come first served for the first of them only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor")
    parser.add_argument("--tokens", default="144,1024", help="sizes of passes, trainer.micro_batch_tokens")
    parser.add_argument("--steps", type=int, default=40, help="of the small tenant; first come first served: an eighth")
    parser.add_argument("--draw", type=Path, default=None, help="a PNG")
    wanted = parser.parse_args(arguments)
    tune_malloc()
    clock, found = time.process_time if wanted.cpu else time.perf_counter, dict[int, Steps]()
    print(
        "| passes of at most, tokens | order | steps | p50, s | p95, s | p95 / p50 alone |\n|---|---|---|---|---|---|"
    )
    for number, tokens in enumerate(map(int, wanted.tokens.split(","))):
        steps = {ALONE: wanted.steps // 2, FAIR: wanted.steps}
        if number == 0:
            steps |= {RESTLESS: wanted.steps // 2, FIFO: max(3, wanted.steps // 8)}
        found[tokens] = {}
        for order, number_of_steps in steps.items():
            seconds = asyncio.run(measure(wanted.threads, clock, tokens, order, number_of_steps))
            found[tokens][order] = seconds
            show(tokens, order, seconds, statistics.median(found[tokens][ALONE]))
            if wanted.draw is not None:
                draw_curves(found, wanted.draw)


if __name__ == "__main__":
    main()
