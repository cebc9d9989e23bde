"""What it costs to sample from thousands of saved adapters through one base server, which has a few of them loaded.

    python bench/served_adapters.py [--model tiny-random] [--adapters 2000] [--loaded 16] [--at-once 32]

The base in bf16; adapters of rank 8 beside the query and value projections, each in a folder of its own, with
numbers of its own. Clients of the Tinker API ask for a reply of 4 tokens from an adapter each: first from as many
adapters as are loaded, then from each adapter once, then from some much more often than from others (Zipf, exponent
1.1). The server is in this process; memory and processor seconds are those of the process, clients included. Nothing is
kept.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import torch

from palestra.config import SMOLLM2, AdapterConfig, TrainerConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.http.server import run_on_uvloop
from palestra.models.adapter_files import write_adapter
from palestra.models.device import tune_malloc
from palestra.models.loading import LoadedModels
from palestra.waiting import cancelled
from palestra_bases.models import SharedModelOptions
from palestra_bases.serving import BaseOptions, base_server
from palestra_bases.tinker.serving import TinkerOptions, TinkerServer

ADAPTER = AdapterConfig(rank=8, targets=["q_proj", "v_proj"])
PROMPT, TOKENS = list(range(100, 116)), 4


def write_adapters(folder: Path, base: str, count: int) -> dict[str, Path]:
    """Write adapters with different numbers, in PEFT's format; return their folders by name."""
    model, _ = LoadedModels().adapted(base, ADAPTER, 0, torch.bfloat16, torch.device("cpu"))
    adapter = model.adapter
    assert adapter is not None
    found = {}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for _, parameter in adapter.named_parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
        found[f"a{number}"] = folder / f"a{number}"
        found[f"a{number}"].mkdir()
        write_adapter(found[f"a{number}"], adapter)
    return found


class Clients:
    """Clients of the Tinker API, each with a sampling session of each adapter."""

    def __init__(self, server: TinkerServer, at_once: int) -> None:
        key = server.tenants.files[0].read_text()
        limits = httpx2.Limits(max_connections=at_once)
        url = f"{server.url}/api/v1/"
        self.http = httpx2.AsyncClient(base_url=url, headers={"x-api-key": key}, timeout=300, limits=limits)
        self._server, self._at_once, self._number = server, at_once, 0
        self._samplers: list[str] = []

    async def _post(self, route: str, body: dict[str, Any]) -> httpx2.Response:
        answer = await self.http.post(route, json=body)
        answer.raise_for_status()
        return answer

    async def open(self, names: Sequence[str]) -> None:
        """Make the sampling sessions."""
        session = (await self._post("create_session", {"tags": [], "sdk_version": "bench"})).json()["session_id"]

        async def one(number: int, name: str) -> str:
            path = f"tinker://imported:train:0/sampler_weights/{name}"
            body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
            return str((await self._post("create_sampling_session", body)).json()["sampling_session_id"])

        self._alive = asyncio.create_task(self._beat(session))
        self._samplers = await asyncio.gather(*(one(number, name) for number, name in enumerate(names)))

    async def _beat(self, session: str) -> None:
        """Keep the session alive, as the SDK does."""
        while True:
            await asyncio.sleep(10)
            await self._post("session_heartbeat", {"session_id": session})

    async def close(self) -> None:
        """End the heartbeats, and close the connections."""
        await cancelled(self._alive)
        await self.http.aclose()

    async def _sample(self, adapter: int) -> float:
        """Sample a reply, and return the seconds that it took."""
        began, self._number = time.monotonic(), self._number + 1
        body = {
            "sampling_session_id": self._samplers[adapter],
            "seq_id": self._number,
            "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": {"max_tokens": TOKENS, "stop": [], "seed": 1},
        }
        request_id = (await self._post("asample", body)).json()["request_id"]
        while (answer := await self._post("retrieve_future", {"request_id": request_id})).headers[
            "content-type"
        ] == "application/json":
            assert answer.json()["type"] == "try_again", answer.text
        return time.monotonic() - began

    async def measure(self, title: str, adapters: Sequence[int]) -> None:
        """Sample from each of some adapters, in their order, so many at the same time; print a row."""
        cache, gate = self._server.shared.adapters, asyncio.Semaphore(self._at_once)
        loads, began, spent = cache.loads, time.monotonic(), time.process_time()

        async def one(adapter: int) -> float:
            async with gate:
                return await self._sample(adapter)

        seconds = sorted(await asyncio.gather(*map(one, adapters)))
        wall, resident = time.monotonic() - began, psutil.Process().memory_info().rss / 2**20
        middle, late = (seconds[int(len(seconds) * share)] for share in (0.5, 0.95))
        cost, used = 1000 * (time.process_time() - spent) / len(adapters), len(set(adapters))
        counts = f"{used} | {len(adapters)} | {len(adapters) / wall:.1f} | {cost:.0f} | {middle:.2f} | {late:.2f}"
        print(f"| {title} | {counts} | {cache.loads - loads} | {len(cache.names)} | {resident:.0f} |", flush=True)


async def main(arguments: argparse.Namespace) -> None:
    """Write the adapters, serve, and measure."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        began = time.monotonic()
        adapters = write_adapters(folder, arguments.model, arguments.adapters)
        size = sum(file.stat().st_size for file in adapters["a0"].iterdir()) / 2**20
        print(f"{len(adapters)} adapters of {size:.2f} MiB, written in {time.monotonic() - began:.0f} s\n")
        parts = {"dtype": "bfloat16", "threads": arguments.threads, "device": "cpu"}
        tinker = TinkerOptions(folder=folder / "base" / "tinker", port=0, adapters=adapters)
        shared = SharedModelOptions(
            models=(arguments.model,),
            engine=EmbeddedEngineConfig.model_validate(parts),
            trainer=TrainerConfig.model_validate(parts),
            loaded_adapters=arguments.loaded,
        )
        options = BaseOptions(shared=shared, folder=folder / "base", runs=folder, tinker=tinker)
        async with base_server(options) as server:
            assert server.tinker is not None
            print(f"serving after {time.monotonic() - began:.0f} s\n", flush=True)
            clients = Clients(server.tinker, arguments.at_once)
            await clients.open(list(adapters))
            print(
                "| | adapters | requests | a second | CPU ms each | median s | p95 s | loads | loaded | MiB |\n"
                "|---|---|---|---|---|---|---|---|---|---|"
            )
            draw, count = np.random.default_rng(0), len(adapters)
            few = [number % min(arguments.loaded, count) for number in range(count // 4)]
            await clients.measure("as many as are loaded", few)
            await clients.measure("each once", draw.permutation(count).tolist())
            weights = 1.0 / np.arange(1, count + 1) ** 1.1
            often = draw.choice(count, count, p=weights / weights.sum()).tolist()
            await clients.measure("some more often", often)
            await clients.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--loaded", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    tune_malloc()
    run_on_uvloop(main(parser.parse_args()))
