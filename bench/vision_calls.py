"""What a picture adds to a call, beside what the bare tower costs; and how often a picture of many episodes is kept.

    python bench/vision_calls.py [--rounds 30] [--episodes 1000]

The model is of Idefics3's architecture with random weights, float32, one thread: a picture of 192 x 192 pixels is cut
into 36 tiles of 32 pixels and the whole, and has 148 embeddings. Three things take turns, each round with another
picture: transformers' own image processor and tower; a call of one token with that picture; and a call whose prompt has
as many tokens and no picture. Calls are made of the engine in this process, and over HTTP with the file as a data URL,
which is decoded, checked, and written to disk. What a picture adds is the difference of the medians.

Then so many episodes of a job are played, all with the same picture, and the files of the run are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import machine
import numpy as np
import torch
from PIL import Image

import palestra
from palestra import JobConfig
from palestra.config import parse_config
from palestra.engine.base import EngineRequest
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.models.vision.tiny import TILE, make_tiny_vision
from palestra.pictures.pixels import encode_picture
from palestra.runtime.local import local_job
from palestra.runtime.local_job import LocalJob
from palestra.types.calls import SamplingParams, TokenSequence
from palestra.types.messages import ChatMessage, ImagePart, TextPart

SIDE = 6 * TILE  # pixels
EXACT = {"engine": {"dtype": "float32", "threads": 1}, "trainer": {"dtype": "float32", "threads": 1}}
Work = Callable[[int], Awaitable[None]]  # of a round


class Same(palestra.Environment):
    """One look at a picture, which is the same in all episodes."""

    max_steps = 1

    def reset(self, task: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the picture."""
        return ["look", np.asarray(drawn(0))], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Pay for anything."""
        return "", float(len(action)), True, False, {}


def drawn(number: int) -> Image.Image:
    """Return a picture of noise on large squares, which differs from all others."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(pixels, np.ones((8, 8, 1), np.uint8)))


def content(number: int, digest: str) -> tuple[ChatMessage, ...]:
    """Return the messages of a round; the text comes first, so that no two rounds have a beginning in common."""
    part = ImagePart(digest=digest)
    return (ChatMessage(role="user", content=(TextPart(text=f"{number:08d}"), part)),)


async def seconds_of(work: Work, number: int) -> float:
    """Return how long a piece of work takes."""
    began = time.perf_counter()
    await work(number)
    return time.perf_counter() - began


def works_of(job: LocalJob, http: httpx2.AsyncClient) -> tuple[dict[str, Work], Callable[[int], None]]:
    """Return what takes turns, by name, and what prepares a round before it is timed."""
    runtime = job.plane.sessions.context.policies.runtime("policy")
    assert isinstance(job.opened.engine, EmbeddedEngine)
    vision, pictures = job.opened.engine._policies["policy"].model.vision, job.plane.store.pictures
    assert vision is not None
    sampling = SamplingParams(temperature=0.0, max_tokens=1, seed=0)

    async def bare(number: int) -> None:
        def compute() -> None:
            torch.set_num_threads(1)
            with torch.inference_mode():
                vision.tower(vision.processor.pixels(images[number]))

        await asyncio.to_thread(compute)

    async def sampled(prompt: TokenSequence) -> None:
        async for _ in runtime.engine.generate(EngineRequest(policy="policy", prompt=prompt, sampling=sampling)):
            pass

    def prompt_of(number: int, offset: int) -> TokenSequence:
        digest = pictures.put(encode_picture(drawn(number + offset)))
        return runtime.renderer.render(content(number + offset, digest))

    async def engine_picture(number: int) -> None:
        await sampled(prompts[number])

    async def engine_text(number: int) -> None:
        await sampled(TokenSequence(plain[number].ids, ()))

    async def posted(part: dict[str, Any], number: int) -> None:
        parts = [{"type": "text", "text": f"{number:08d}"}, part]
        body = {"model": "policy", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        answer = await http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()

    async def http_picture(number: int) -> None:
        url = f"data:image/png;base64,{files[number]}"
        await posted({"type": "image_url", "image_url": {"url": url}}, number + 300_000)

    async def http_text(number: int) -> None:
        await posted({"type": "text", "text": "x" * lengths}, number + 400_000)

    images: dict[int, Image.Image] = {}
    prompts: dict[int, TokenSequence] = {}
    plain: dict[int, TokenSequence] = {}
    files: dict[int, str] = {}
    lengths = sum(span.tokens for span in prompt_of(0, 500_000).media)

    def prepare(number: int) -> None:
        images[number] = drawn(number)
        prompts[number], plain[number] = prompt_of(number, 100_000), prompt_of(number, 200_000)
        files[number] = base64.b64encode(encode_picture(drawn(number + 300_000))).decode()

    works: dict[str, Work] = {
        "the bare tower, with its processor": bare,
        "engine, with a picture": engine_picture,
        "engine, as many tokens": engine_text,
        "HTTP, with a picture": http_picture,
        "HTTP, as many tokens": http_text,
    }
    return works, prepare


async def costs(model: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds of each piece of work."""
    policy = {"model": str(model), "max_context": 2048}
    config = parse_config(
        {"name": "calls", "kind": "inference", "run_dir": str(folder), "policies": {"policy": policy}}
        | {"server": {"port": 0}, "engine": EXACT["engine"]}
    )
    async with local_job(config, lambda kind, data: None) as job:
        headers = {"authorization": f"Bearer {job.plane.keys.job_key}"}
        async with httpx2.AsyncClient(base_url=job.url, timeout=60, trust_env=False, headers=headers) as http:
            works, prepare = works_of(job, http)
            taken: dict[str, list[float]] = {name: [] for name in works}
            for number in range(rounds + 2):
                prepare(number)
                for name, work in works.items():
                    seconds = await seconds_of(work, number)
                    if number >= 2:  # the first two are not counted
                        taken[name].append(seconds)
    return {name: statistics.median(found) for name, found in taken.items()}


def kept_of(model: Path, folder: Path, episodes: int) -> tuple[int, int]:
    """Play episodes with one picture, and return the number of files and of their bytes."""
    settings = {
        "name": "same",
        "steps": 1,
        "run_dir": str(folder),
        "policies": {"policy": {"model": str(model), "max_context": 512, "sampling": {"max_tokens": 1}}},
        "rollout": {"groups_per_step": episodes // 8, "group_size": 8},
        "evaluation": {"every_steps": 0},
        "environment": {"max_concurrency": 64},
        **EXACT,
    }
    tasks = [{"n": n} for n in range(episodes // 8)]
    palestra.train(environment=Same, tasks=tasks, config=JobConfig.model_validate(settings), quiet=True)
    files = list((folder / "pictures").glob("??/*"))
    return len(files), sum(file.stat().st_size for file in files)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--episodes", type=int, default=1000)
    given = parser.parse_args()
    where: dict[str, Any] = {}
    with machine.observed(where), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny_vision(folder / "model", width=512, longest=SIDE)
        found = asyncio.run(costs(folder / "model", folder / "calls", given.rounds))
        make_tiny_vision(folder / "small")
        files, size = kept_of(folder / "small", folder / "same", given.episodes)
    tower = found["the bare tower, with its processor"]
    print("| | median ms |")
    print("|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds * 1000:.1f} |")
    for way in ("engine", "HTTP"):
        added = found[f"{way}, with a picture"] - found[f"{way}, as many tokens"]
        print(f"| a picture adds, {way} | {added * 1000:.1f}, {added / tower:.2f} times the bare tower |")
    print(f"\n{given.episodes // 8 * 8} episodes with one picture: {files} file(s) of {size:,} bytes")
    print(machine.remark(where))


if __name__ == "__main__":
    main()
