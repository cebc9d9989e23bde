"""What vLLM costs as a job's engine: tokens a second beside the bare server, and new weights.

python bench/vllm_server.py --vllm .venv-peers/vllm/bin/python [--rounds 5] [--threads 2] [--updates]

Prints three tables in Markdown; with --updates one, of new weights by a file and by a broadcast of gloo, in turns.

One vLLM server, started as a job starts it, is asked in turns by the engine of a job (logprobs and versions of all
tokens, checked), by a bare client (`/v1/completions` with token ids, nothing else), and by a bare client that wants
logprobs and ids as well, as training does: for whole replies first, and then for streamed ones, token by token. What
disturbs the machine disturbs all of them. Then the server gets all weights of SmolLM2-135M in bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import uvloop
from machine import observed, remark

from palestra.config import SMOLLM2, JobConfig, parse_config
from palestra.engine.base import Engine, EngineRequest
from palestra.engine.driver import EngineJob
from palestra.models.catalog import model_folder
from palestra.models.weights import FileWeights, LocalWeights
from palestra.terminal import say
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from palestra_engines.external.connection import Address
from palestra_engines.external.served_models import read_served_models
from palestra_engines.external.workers import EngineServers
from palestra_engines.vllm.config import VllmEngineConfig
from palestra_engines.vllm.driver import VllmDriver

PROMPT_TOKENS, NEW_TOKENS = 40, 24
WORK = ((64, "64 different prompts"), (8, "8 different prompts"), (1, "one request"))
UPDATES = 8
Ask = Callable[[list[int], int], Coroutine[Any, Any, int]]
numbers = itertools.count()


def prompt_of(draw: random.Random) -> list[int]:
    """A prompt of ordinary tokens that no earlier round had."""
    return [draw.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]


def through(engine: Engine, streamed: bool) -> Ask:
    """A client that asks the engine of a job, for whole replies or token by token."""

    async def ask(prompt: list[int], tokens: int) -> int:
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, seed=next(numbers))
        ids = TokenSequence(np.array(prompt, np.int32))
        request = EngineRequest(policy="policy", prompt=ids, sampling=sampling, streamed=streamed)
        return sum([len(piece.ids) async for piece in engine.generate(request)])

    return ask


def bare(session: aiohttp.ClientSession, address: Address, model: Path, logprobs: bool, streamed: bool) -> Ask:
    """A client that asks the server for completions, with logprobs and ids or without; without a seed.

    vLLM's build for CPUs dies where it splits the prompt of a request with a seed.
    """
    headers = {"authorization": f"Bearer {address.key}"}

    async def ask(prompt: list[int], tokens: int) -> int:
        body: dict[str, Any] = {"model": str(model), "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        body["temperature"] = 1.0
        if logprobs:
            body |= {"logprobs": 0, "return_token_ids": True}
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with session.post(f"{address.url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, f"the server answers {answer.status}: {await answer.text()}"
            if not streamed:
                return int((await answer.json())["usage"]["completion_tokens"])
            events = [line[5:].strip() async for line in answer.content if line.startswith(b"data:")]
        assert events.pop() == b"[DONE]"
        return int([json.loads(event) for event in events][-1]["usage"]["completion_tokens"])

    return ask


async def rate(ask: Ask, requests: int, draw: random.Random) -> float:
    """Tokens a second of so many requests at the same time."""
    prompts = [prompt_of(draw) for _ in range(requests)]
    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(ask(prompt, NEW_TOKENS) for prompt in prompts)))
    assert tokens == requests * NEW_TOKENS
    return tokens / (time.perf_counter() - began)


async def compare(title: str, contestants: dict[str, Ask], rounds: int) -> None:
    """Print tokens a second of each contestant, and the first one's median ratio to each other, of the rounds."""
    ours, *others = contestants
    say(
        f"\n| {title}, tokens/s | "
        + " | ".join(contestants)
        + " | "
        + " | ".join(f"{ours} / {one}" for one in others)
        + " |"
    )
    say("|---|" + "---:|" * (2 * len(contestants) - 1))
    for requests, name in WORK:
        found: dict[str, list[float]] = {one: [] for one in contestants}
        for number in range(rounds + 1):
            for one, ask in sorted(contestants.items(), reverse=bool(number % 2)):
                value = await rate(ask, requests, random.Random(f"{one} {requests} {number}"))
                if number:  # the first round warms up
                    found[one].append(value)
        rates = " | ".join(f"{statistics.median(values):.0f}" for values in found.values())
        say(f"| {name} | {rates} | {' | '.join(ratio(found[ours], found[one]) for one in others)} |")


def ratio(first: list[float], second: list[float]) -> str:
    """The median of the ratios of each round, and the lowest and the highest one."""
    found = [one / other for one, other in zip(first, second, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


async def update(engine: Engine, weights: LocalWeights, busy: bool) -> float:
    """Seconds of an update, while nothing or eight replies are sampled."""
    ask = through(engine, streamed=False)
    replies = [asyncio.create_task(ask(prompt_of(random.Random()), 200)) for _ in range(8 * busy)]
    await asyncio.sleep(1.0 * busy)
    began = time.perf_counter()
    await engine.sync_weights("policy", PolicyVersion(0, next(numbers)), weights)
    seconds = time.perf_counter() - began
    await asyncio.gather(*replies)
    return seconds


async def compare_updates(engines: dict[str, Engine], weights: LocalWeights) -> None:
    """Print how long new weights take to each engine, in turns, and the first one's median ratio to the others."""
    first, *others = engines
    count = sum(one.numel() for _, one in weights.named) / 1e6
    say(
        f"\n| new weights, {count:.0f} M parameters | " + " | ".join(f"{one}: median s (range)" for one in engines),
        end="",
    )
    say("".join(f" | {first} / {one}" for one in others) + " |")
    say("|---|" + "---:|" * (len(engines) + len(others)))
    for busy, name in ((False, "nothing is sampled"), (True, "eight replies are sampled")):
        found: dict[str, list[float]] = {one: [] for one in engines}
        for number in range(UPDATES + 1):
            for one, engine in sorted(engines.items(), reverse=bool(number % 2)):
                seconds = await update(engine, weights, busy)
                if number:  # the first round warms up: a group is made, memory is given
                    found[one].append(seconds)
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in found.values()]
        cells += [ratio(found[first], found[one]) for one in others]
        say(f"| {name} | " + " | ".join(cells) + " |")


def all_weights(shapes: Collection[str]) -> LocalWeights:
    """The weights of SmolLM2-135M as a trainer has them: in float32."""
    folder = model_folder(SMOLLM2)
    assert isinstance(folder, Path)
    (file,) = folder.glob("model*.safetensors")
    return LocalWeights([(name, one.float()) for name, one in FileWeights(file).tensors() if name in shapes])


DRIVER = VllmDriver()


async def run(config: JobConfig, rounds: int) -> None:
    """Start the server, and print all tables."""
    assert isinstance(config.engine, VllmEngineConfig)
    settings, job = config.engine, EngineJob(config=config)
    models = read_served_models(job, DRIVER.images)
    places = (await in_thread(partial(DRIVER.places, job, settings, models))).of_worker(0)
    servers = await in_thread(lambda: EngineServers(DRIVER, settings, models, 0, config.folder, places))
    engine = await in_thread(servers.engine)
    folder, address = model_folder(SMOLLM2), servers.addresses[0]
    assert isinstance(folder, Path)
    try:
        connector = aiohttp.UnixConnector(str(address.socket), limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            for streamed, name in ((False, "whole replies"), (True, "streamed replies")):
                contestants = {
                    "engine of a job": through(engine, streamed),
                    "bare": bare(session, address, folder, False, streamed),
                    "bare with logprobs": bare(session, address, folder, True, streamed),
                }
                await compare(name, contestants, rounds)
        await compare_updates({"by a file": engine}, all_weights(models[0].files.shapes))
    finally:
        await engine.close()


async def run_updates(configs: dict[str, JobConfig]) -> None:
    """Start a server for each way of new weights, and print how long they take."""
    engines: dict[str, Engine] = {}
    try:
        for name, config in configs.items():
            assert isinstance(config.engine, VllmEngineConfig)
            settings, job = config.engine, EngineJob(config=config)
            models = read_served_models(job, DRIVER.images)
            places = (await in_thread(partial(DRIVER.places, job, settings, models))).of_worker(0)
            rounds = DRIVER.rounds(settings)
            servers = await in_thread(
                partial(EngineServers, DRIVER, settings, models, 0, config.folder, places, rounds)
            )
            engines[name] = await in_thread(servers.engine)
        await compare_updates(engines, all_weights(models[0].files.shapes))
    finally:
        for engine in engines.values():
            await engine.close()


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="interpreter that has vLLM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--updates", action="store_true", help="new weights alone, by a file and by a broadcast")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:

        def config_of(transfer: str) -> JobConfig:
            engine = {"kind": "vllm", "python": arguments.vllm, "threads": arguments.threads, "cache_gib": 2}
            return parse_config(
                {
                    "run_dir": f"{folder}/{transfer}",
                    "policies": {"policy": {"max_context": 1024}},
                    "engine": engine | {"weight_transfer": transfer},
                }
            )

        work = (
            run_updates({"by a file": config_of("file"), "by a broadcast": config_of("gloo")})
            if arguments.updates
            else run(config_of("file"), arguments.rounds)
        )
        machine: dict[str, Any] = {}
        with observed(machine):
            uvloop.run(work)
    say(f"\n{remark(machine)}")


if __name__ == "__main__":
    main()
