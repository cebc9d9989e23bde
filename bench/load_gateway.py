"""Load for the gateway's own costs, from a process of its own; prints one JSON line.

    python bench/load_gateway.py stream URL KEY PID --workers 512 --seconds 5    calls with stream = true
    python bench/load_gateway.py held URL KEY PID --workers 512                  memory while that many calls wait
    python bench/load_gateway.py growth URL KEY PID --workers 512 --calls 20000  memory over many calls and episodes

PID is the server's. `held` needs an engine that takes longer than the calls take to arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import aiohttp
import uvloop
from load import Load, chat_body, summary, usage

CALLS_AN_EPISODE = 16
HELD_ROUNDS = 3
ARRIVED = 0.8  # of the engine's delay: when all calls are in, and none is answered
SAMPLES = 40  # of the memory, over all calls
END = b"data: [DONE]"
MIB = 2**20


async def stream(load: Load, workers: int, pid: int, seconds: float) -> dict[str, Any]:
    """Each worker streams one reply after another, in an episode of its own."""
    episodes = await asyncio.gather(*(load.claim(number) for number in range(workers)))
    body = json.loads(chat_body(episodes[0]["model"])) | {"stream": True}
    if refused := await _refused(load, episodes[0], body):
        return {"refused": refused}
    firsts: list[float] = []

    async def one(episode: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {episode['api_key']}"}
        begin, seen = time.perf_counter(), b""
        async with load.http.post(f"{episode['base_url']}/chat/completions", json=body, headers=headers) as answer:
            async for chunk in answer.content.iter_any():
                if not seen:
                    firsts.append(time.perf_counter() - begin)
                seen += chunk
        if answer.status != 200 or END not in seen:
            raise ValueError(f"{answer.status} {seen[-200:]!r}")

    async def worker(episode: dict[str, Any]) -> None:
        while time.perf_counter() < load.stop:
            await load.timed(one(episode))

    cpu, rss = usage(pid)
    begin = time.perf_counter()
    load.stop = begin + seconds
    await asyncio.gather(*map(worker, episodes))
    wall = time.perf_counter() - begin
    cpu_after, rss_after = usage(pid)
    await asyncio.gather(*map(load.end, episodes))
    firsts.sort()
    tails = {"first_p50_ms": 1e3 * firsts[len(firsts) // 2], "first_p99_ms": 1e3 * firsts[int(0.99 * len(firsts))]}
    return summary(load, wall, cpu_after - cpu, rss_after - rss) | tails


async def _refused(load: Load, episode: dict[str, Any], body: dict[str, Any]) -> str:
    """What the server says against streaming; nothing if it streams."""
    headers = {"authorization": f"Bearer {episode['api_key']}"}
    async with load.http.post(f"{episode['base_url']}/chat/completions", json=body, headers=headers) as answer:
        text = await answer.read()
    if answer.status == 400:
        return str(json.loads(text).get("error", {}).get("message", text[:200]))
    return ""


async def held(load: Load, workers: int, pid: int, delay: float) -> dict[str, Any]:
    """KiB of a waiting call: resident memory with all of them waiting, less that with none, in a few rounds.

    The first round, in which the server makes its episodes and connections, is not counted.
    """
    episodes = await asyncio.gather(*(load.claim(number) for number in range(workers)))
    body = chat_body(episodes[0]["model"])
    found: list[float] = []
    for _ in range(1 + HELD_ROUNDS):
        before = usage(pid)[1]
        calls = asyncio.gather(*(load.timed(load.call(episode, body)) for episode in episodes))
        await asyncio.sleep(ARRIVED * delay)
        found.append((usage(pid)[1] - before) / 1024 / workers)
        if load.latencies[(len(found) - 1) * workers :]:
            raise SystemExit("calls were answered before all of them had arrived")
        await calls
    return {"held_kib": found[1:], "errors": sum(load.errors.values()), "error_kinds": dict(load.errors)}


async def growth(load: Load, workers: int, pid: int, calls: int) -> dict[str, Any]:
    """Resident memory while `calls` are made, in episodes of `CALLS_AN_EPISODE`."""
    begun = 0

    async def worker(number: int) -> None:
        nonlocal begun
        while begun < calls:
            episode = await load.claim(number)
            body = chat_body(episode["model"])
            for _ in range(CALLS_AN_EPISODE):
                if begun < calls:
                    begun += 1
                    await load.timed(load.call(episode, body))
            await load.end(episode)

    samples = [(0, usage(pid)[1] / MIB)]
    cpu, begin = usage(pid)[0], time.perf_counter()
    work = asyncio.gather(*map(worker, range(workers)))
    while not work.done():
        await asyncio.wait([work], timeout=0.2)
        done = len(load.latencies)
        if done - samples[-1][0] >= calls / SAMPLES or work.done():
            samples.append((done, usage(pid)[1] / MIB))
    await work
    wall = time.perf_counter() - begin
    return summary(load, wall, usage(pid)[0] - cpu, 0) | {"rss_mib": samples}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The work that was asked for."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as http:
        load = Load(arguments.url, arguments.key, http)
        if arguments.work == "stream":
            return await stream(load, arguments.workers, arguments.pid, arguments.seconds)
        if arguments.work == "held":
            return await held(load, arguments.workers, arguments.pid, arguments.delay)
        return await growth(load, arguments.workers, arguments.pid, arguments.calls)


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["stream", "held", "growth"])
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("pid", type=int)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--delay", type=float, default=5.0, help="seconds that the engine takes for a reply")
    parser.add_argument("--calls", type=int, default=20_000)
    print(json.dumps(uvloop.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
