"""What inference workers cost and gain: two processes beside one engine, an added call, and new weights.

python bench/engine_pool.py [--quick] [--only TABLE] [--model NAME]

Prints three tables in Markdown. The contestants are loaded at the same time and take turns, so that what disturbs the
machine disturbs both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import psutil
import uvloop
from machine import observed

from palestra.config import SMOLLM2, JobConfig
from palestra.engine.base import Engine, EngineRequest
from palestra.models.weights import LocalWeights
from palestra.runtime.parts import build_parts, pooled_parts
from palestra.terminal import say
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence

seeds = itertools.count()


@contextlib.asynccontextmanager
async def engine_of(model: str, **settings: Any) -> AsyncIterator[Engine]:
    """An engine of a job: in this process, or in workers of `replicas`."""
    given: Mapping[str, Any] = {"model": model, "engine": settings}
    config = JobConfig.model_validate(given)
    apart = settings.get("replicas", 1) > 1
    parts = await pooled_parts(config, {}) if apart else await in_thread(lambda: build_parts(config))
    try:
        yield parts.engine
    finally:
        await parts.engine.close()
        if parts.trainer is not None:
            await parts.trainer.close()


async def reply(engine: Engine, prompt: np.ndarray, tokens: int) -> int:
    """Sample one reply of exactly so many tokens, and return their number."""
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, seed=next(seeds))
    request = EngineRequest(policy="policy", prompt=TokenSequence(prompt), sampling=sampling)
    return sum([len(piece.ids) async for piece in engine.generate(request)])


async def rate(engine: Engine, groups: int, samples: int, prompt_tokens: int, tokens: int) -> float:
    """Return how many tokens are sampled in a second, where groups of equal prompts arrive at the same time."""
    draw = np.random.default_rng(next(seeds))
    prompts = [draw.integers(300, 40_000, prompt_tokens, np.int32) for _ in range(groups)]
    began = time.perf_counter()
    found = await asyncio.gather(*(reply(engine, one, tokens) for one in prompts for _ in range(samples)))
    return sum(found) / (time.perf_counter() - began)


async def throughput(model: str, rounds: int) -> None:
    """Print tokens a second of one engine with two threads, and of two workers with one each."""
    say("\n| work | one engine, 2 threads (tokens/s) | 2 workers, 1 thread each | ratio (median of rounds) |")
    say("|---|---:|---:|---:|")
    async with engine_of(model, threads=2) as one, engine_of(model, threads=1, replicas=2) as two:
        for name, groups, samples in (("8 prompts x 8", 8, 8), ("64 prompts", 64, 1)):
            pairs = []
            for number in range(rounds + 1):
                order = (one, two) if number % 2 else (two, one)
                found = {engine: await rate(engine, groups, samples, 48, 24) for engine in order}
                pairs.append((found[one], found[two]))
            pairs = pairs[1:]  # the first round warms both
            ratios = statistics.median(b / a for a, b in pairs)
            own, pool = (statistics.median(column) for column in zip(*pairs, strict=True))
            say(f"| {name} | {own:.0f} | {pool:.0f} | {ratios:.2f} |")


async def added_latency(calls: int) -> None:
    """Print what a worker adds to a call of one token, without a model."""
    say("\n| calls in flight | in this process, p50 (ms) | in a worker | added | CPU of both sides |")
    say("|---:|---:|---:|---:|---:|")
    prompt = np.arange(300, 812, dtype=np.int32)
    async with engine_of("tiny-random", kind="fake") as one, engine_of("tiny-random", kind="fake", replicas=2) as two:
        for flight in (1, 16):
            medians = []
            for engine in (one, two):
                spent: list[float] = []

                async def caller(engine: Engine, spent: list[float], count: int) -> None:
                    for _ in range(count):
                        began = time.perf_counter()
                        await reply(engine, prompt, 1)
                        spent.append(time.perf_counter() - began)

                used = cpu_seconds(engine)
                await asyncio.gather(*(caller(engine, spent, calls // flight) for _ in range(flight)))
                used = (cpu_seconds(engine) - used) / len(spent) * 1000
                medians.append(statistics.median(spent) * 1000)
            own, apart = medians
            say(f"| {flight} | {own:.3f} | {apart:.3f} | {apart - own:.3f} | {used:.3f} |")


def cpu_seconds(engine: Engine) -> float:
    """Return the processor time that this process and an engine's workers have used."""
    processes = [worker.process for worker in engine.load().workers if worker.process is not None]
    times = [psutil.Process(process).cpu_times() for process in (os.getpid(), *processes)]
    return float(sum(each.user + each.system for each in times))


async def updates(model: str, rounds: int) -> None:
    """Print how long new weights take to two workers, one after another and all together."""
    import torch

    from palestra.models.causal_lm import load_causal_lm

    trained = await in_thread(lambda: load_causal_lm(model, torch.float32))
    weights = LocalWeights([(name, tensor.detach()) for name, tensor in trained.named_parameters()])
    numbers = sum(tensor.numel() for _, tensor in weights.tensors())
    say(f"\n| new weights of {numbers / 1e6:.0f} M parameters, to 2 workers (s) | median; smallest to largest |")
    say("|---|---:|")
    async with engine_of(model, threads=1, replicas=2) as engine:
        spent = []
        for number in range(rounds + 1):
            began = time.perf_counter()
            await engine.sync_weights("policy", PolicyVersion(0, number + 1), weights)
            spent.append(time.perf_counter() - began)
    spent = spent[1:]
    say(f"| one after another | {statistics.median(spent):.2f}; {min(spent):.2f} to {max(spent):.2f} |")


async def main() -> None:
    """Measure, and print the tables and the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--only", choices=("calls", "updates", "rate"), help="one of the tables")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, not for quoting")
    options = parser.parse_args()
    machine: dict[str, Any] = {}
    with observed(machine):
        if options.only in (None, "calls"):
            await added_latency(200 if options.quick else 2000)
        if options.only in (None, "updates"):
            await updates(options.model, 3 if options.quick else 9)
        if options.only in (None, "rate"):
            await throughput(options.model, 2 if options.quick else 6)
    say(f"\n{machine}")


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as jobs do
        runner.run(main())
