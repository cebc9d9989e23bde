"""What adapters of several tenants on one base cost: training, decoding, publication and memory; prints tables.

    python bench/adapters.py --threads 1 --cpu [--only training,decoding,memory]

SmolLM2-135M, rank 16 on all linear layers, base in bf16. Contestants of a row take turns in one process. Nothing is
written. With `--cpu` seconds are those of the processor, which neighbours on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import psutil

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import SMOLLM2, AdapterConfig, TrainerConfig
from palestra.engine.base import EngineRequest
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.models.device import return_freed_memory, tune_malloc
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from palestra.types.records import TrainSample

TENANTS, REPLY = 8, 48
LORA = AdapterConfig(rank=16)
LOSS, UPDATE = LossSpec.of(PPOClipLoss()), OptimParams(learning_rate=3e-4)
Clock = Callable[[], float]
Contestants = dict[str, Callable[[int], Awaitable[None]]]


async def in_turns(contestants: Contestants, clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round but the first, in turns."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        names = list(contestants)
        for name in names if number % 2 else names[::-1]:
            begin = clock()
            await contestants[name](number)
            found[name].append(clock() - begin)
    return {name: seconds[1:] for name, seconds in found.items()}


def show(title: str, found: dict[str, list[float]], beside: dict[str, str]) -> None:
    """Print medians with their ranges, and the median of the ratios of each round."""
    print(f"\n### {title}\n\n| | seconds | beside | ratio |\n|---|---|---|---|")
    for name, seconds in found.items():
        ratio = ""
        if name in beside:
            ratio = f"{statistics.median(a / b for a, b in zip(seconds, found[beside[name]], strict=True)):.3g}"
        low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
        print(f"| {name} | {middle:.3g} ({low:.3g} to {high:.3g}) | {beside.get(name, '')} | {ratio} |", flush=True)


# Training.


def rows(draw: np.random.Generator, groups: int, samples: int, prompt: int, reply: int) -> list[TrainSample]:
    """Rows of made-up episodes, of which those of a group share their prompt."""
    found = []
    for group in range(groups):
        start = draw.integers(10, 40_000, prompt)
        for sample in range(samples):
            ids = np.concatenate((start, draw.integers(10, 40_000, reply))).astype(np.int32)
            mask = np.arange(len(ids)) >= prompt
            found.append(
                TrainSample(
                    episode_id=f"{group}-{sample}",
                    policy="policy",
                    ids=ids,
                    loss_mask=mask,
                    logprobs=np.where(mask, np.float32(-10.0), np.float32(np.nan)),
                    versions=np.where(mask[:, None], np.int32(0), np.int32(-1)).repeat(2, axis=1),
                    calls=np.where(mask, np.int32(0), np.int32(-1)),
                    advantages=np.where(mask, np.float32(draw.normal()), np.float32(0.0)),
                    loss_weights=np.where(mask, np.float32(1e-3), np.float32(0.0)),
                    temperatures=np.ones(len(ids), np.float32),
                )
            )
    return found


async def training(threads: int, clock: Clock, rounds: int, tokens: int | None) -> None:
    """A step with an adapter beside one of all weights; eight tenants in common passes and one after another."""
    from palestra.models.loading import LoadedModels
    from palestra_bases.training.queue import TrainingQueue
    from palestra_bases.training.shared_trainer import SharedTrainer
    from palestra_bases.training.tenant_trainer import TenantTrainer

    trainer = SharedTrainer(TrainerConfig(threads=threads, micro_batch_tokens=tokens), 2, LoadedModels())
    queue, names = TrainingQueue(trainer), [f"t{number}" for number in range(TENANTS)]
    tenants = {name: TenantTrainer(queue, name) for name in (*names, "full")}
    for number, (name, tenant) in enumerate(tenants.items()):
        queue.add_tenant(name)
        await tenant.create("p", PolicySpec(model=SMOLLM2, adapter=None if name == "full" else LORA, seed=number))
    ids = iter(range(10**9))

    async def step(name: str, batch: list[TrainSample]) -> None:
        await tenants[name].forward_backward("p", batch, LOSS, f"g{next(ids)}")
        await tenants[name].optim_step("p", UPDATE, f"u{next(ids)}")

    async def one_by_one(batches: dict[str, list[TrainSample]]) -> None:
        for name, batch in batches.items():
            await step(name, batch)

    async def together(batches: dict[str, list[TrainSample]]) -> None:
        await asyncio.gather(*(step(name, batch) for name, batch in batches.items()))

    def groups(number: int) -> dict[str, list[TrainSample]]:
        return {name: rows(np.random.default_rng((number, n)), 1, 8, 40, 12) for n, name in enumerate(names)}

    def short(number: int) -> dict[str, list[TrainSample]]:
        return {name: rows(np.random.default_rng((number, n)), 1, 2, 10, 6) for n, name in enumerate(names)}

    def whole(name: str) -> Callable[[int], Awaitable[None]]:
        return lambda number: one_by_one({name: rows(np.random.default_rng(number), 8, 8, 40, 12)})

    full, lora, mixed, each = "all weights", "one adapter", "8 adapters together", "8 adapters one after another"
    contestants = {
        full: whole("full"),
        lora: whole("t0"),
        mixed: lambda number: together(groups(number)),
        each: lambda number: one_by_one(groups(number)),
    }
    title = "A step of 64 rows: 8 prompts of 40 tokens, 8 replies of 12 to each"
    show(title, await in_turns(contestants, clock, rounds), {lora: full, mixed: full, each: mixed})
    contestants = {
        mixed: lambda number: together(short(number)),
        each: lambda number: one_by_one(short(number)),
    }
    title = "A step of two rows of each tenant: a prompt of 10 tokens, replies of 6"
    show(title, await in_turns(contestants, clock, rounds), {each: mixed})
    await queue.close()


# Decoding and publication.


async def decoding(threads: int, clock: Clock, rounds: int) -> None:
    """Calls of eight tenants at the same time, one after another, and of one policy without an adapter."""
    import torch

    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.loading import LoadedModels

    models, cpu, found = LoadedModels(), torch.device("cpu"), {}
    draw = torch.Generator().manual_seed(0)
    names = [f"t{number}" for number in range(TENANTS)]
    for name in names:
        model, _ = models.adapted(SMOLLM2, LORA, None, torch.bfloat16, cpu)
        for _, parameter in model.own_parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=draw))
        found[name] = PolicyModel(model=model, stop_ids=frozenset())
    engine = EmbeddedEngine(found, EmbeddedEngineConfig(threads=threads))
    base, _ = models.frozen(SMOLLM2, torch.bfloat16, cpu)
    bare = EmbeddedEngine(
        {"bare": PolicyModel(model=base, stop_ids=frozenset())}, EmbeddedEngineConfig(threads=threads)
    )

    async def call(at: EmbeddedEngine, policy: str, seed: int) -> None:
        prompt = np.random.default_rng(seed).integers(10, 40_000, 40).astype(np.int32)
        sampling = SamplingParams(temperature=1.0, max_tokens=REPLY, min_tokens=REPLY, seed=seed)
        request = EngineRequest(policy=policy, prompt=TokenSequence(prompt), sampling=sampling)
        assert len([piece async for piece in at.generate(request)]) == REPLY

    async def mixed(number: int, each: int = 1) -> None:
        calls = [(name, 1000 * number + n) for n, name in enumerate(names * each)]
        await asyncio.gather(*(call(engine, name, seed) for name, seed in calls))

    async def turns(number: int) -> None:
        for n, name in enumerate(names):
            await call(engine, name, 1000 * number + n)

    async def without(number: int, each: int = 1) -> None:
        await asyncio.gather(*(call(bare, "bare", 1000 * number + n) for n in range(TENANTS * each)))

    async def one(number: int) -> None:
        await asyncio.gather(*(call(engine, "t0", 1000 * number + n) for n in range(TENANTS)))

    async def publish(number: int) -> None:
        weights = [(key, p.clone()) for key, p in found["t0"].model.own_parameters()]
        from palestra.models.weights import LocalWeights

        begin = clock()
        await engine.sync_weights("t0", PolicyVersion(0, number + 1), LocalWeights(weights))
        published.append(clock() - begin)

    published: list[float] = []
    same, after, no, single = (
        "8 tenants together",
        "8 tenants one after another",
        "no adapters",
        "8 calls of one tenant",
    )
    title = f"Eight calls: prompts of 40 tokens, replies of {REPLY}"
    contestants: Contestants = {no: without, same: mixed, single: one, after: turns}
    show(title, await in_turns(contestants, clock, rounds), {same: no, single: no, after: same})
    contestants = {no: lambda number: without(number, 8), same: lambda number: mixed(number, 8)}
    title = f"64 calls: prompts of 40 tokens, replies of {REPLY}"
    show(title, await in_turns(contestants, clock, max(2, rounds // 2)), {same: no})
    await in_turns({"publish": publish}, clock, 10)
    show("Publication of an adapter to the engine", {"publish": published[1:]}, {})
    await engine.close()
    await bare.close()


# Memory.


async def memory(tenants: int, threads: int) -> None:
    """Resident memory while tenants come, each of which has been trained and sampled from."""
    import torch

    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.loading import LoadedModels
    from palestra.trainer.torch_trainer import TorchTrainer

    models, cpu, engine = LoadedModels(), torch.device("cpu"), None
    trainer, resident = TorchTrainer(TrainerConfig(threads=threads), 2, models), list[float]()
    for number in range(tenants + 1):
        name = f"t{number}"
        model, _ = models.adapted(SMOLLM2, LORA, None, torch.bfloat16, cpu)
        policy = PolicyModel(model=model, stop_ids=frozenset())
        if engine is None:
            engine = EmbeddedEngine({name: policy}, EmbeddedEngineConfig(threads=threads, cache_gib=0.25))
        else:
            await engine.add_model(name, policy, PolicyVersion(0, 0))
        await trainer.create(name, PolicySpec(model=SMOLLM2, adapter=LORA, seed=number))
        for step in range(2):
            batch = rows(np.random.default_rng(number), 1, 8, 40, 12)
            await trainer.forward_backward(name, batch, LOSS, f"g{step}")
            await trainer.optim_step(name, UPDATE, f"u{step}")
        await engine.sync_weights(name, PolicyVersion(0, 1), await trainer.weights(name))
        sampling = SamplingParams(temperature=1.0, max_tokens=4, seed=0)
        asked = [EngineRequest(policy=f"t{n}", prompt=TokenSequence(batch[0].ids), sampling=sampling) for n in
                 range(max(0, number - 7), number + 1)]  # fmt: skip
        await asyncio.gather(*(_all(engine.generate(request)) for request in asked))
        return_freed_memory()
        resident.append(psutil.Process().memory_info().rss / 2**20)
    for number in range(tenants + 1):  # gradients that wait for their updates, as in the worst case
        await trainer.forward_backward(f"t{number}", batch, LOSS, "g")
    waiting = psutil.Process().memory_info().rss / 2**20
    assert engine is not None
    await engine.close()
    await trainer.close()
    print(f"\n### Memory\n\n| tenants | resident MiB |\n|---|---|\n| 1 | {resident[0]:,.0f} |")
    print(f"| {tenants} | {resident[tenants - 1]:,.0f} |")
    more = statistics.median(
        b - a for a, b in zip(resident[tenants // 2 :], resident[tenants // 2 + 1 :], strict=False)
    )
    print(f"| one more, median of the last {tenants - tenants // 2} | {more:,.0f} |")
    print(f"| {tenants + 1}, each with a gradient that waits | {waiting:,.0f} |")


async def _all(pieces: Any) -> list[Any]:
    return [piece async for piece in pieces]


def _start(part: str, wanted: argparse.Namespace) -> None:
    """Measure one part in this process."""
    tune_malloc()
    clock = time.process_time if wanted.cpu else time.perf_counter
    if part == "memory":
        asyncio.run(memory(16, wanted.threads))
    elif part == "decoding":
        asyncio.run(decoding(wanted.threads, clock, wanted.rounds))
    else:
        asyncio.run(training(wanted.threads, clock, wanted.rounds, wanted.tokens))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each part in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="the one before them is not counted")
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor")
    parser.add_argument("--tokens", type=int, default=None, help="most of one pass, trainer.micro_batch_tokens")
    parser.add_argument("--only", default="training,decoding,memory")
    wanted = parser.parse_args(arguments)
    for part in wanted.only.split(","):
        process = multiprocessing.get_context("spawn").Process(target=_start, args=(part, wanted))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
