"""Closed-loop load on a data plane, from a process of its own; prints one JSON line.

    python bench/load.py chat URL KEY PID --workers 64 --seconds 5      each worker calls the model, in an episode of
                                                                        its own, as fast as it is answered
    python bench/load.py episodes URL KEY PID --workers 32 --seconds 5  each worker claims and ends episodes
    python bench/load.py played URL KEY PID --workers 32 --seconds 5    the same, with one model call in each

PID is the server's: its CPU time and resident memory are read at both ends of the measured time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import uvloop

SYSTEM = "You help people who write programs, and you say in few words what to do. " * 5  # 75 words
USER = "Read the page that is shown below and tell me which link comes first, and why. " * 5  # 80 words
MAX_TOKENS = 32
RETRY_SECONDS = 0.05


@dataclass(slots=True)
class Load:
    """One run: what is called, and what came of it."""

    url: str
    key: str
    http: aiohttp.ClientSession
    stop: float = float("inf")  # `time.perf_counter()` at which no more work is begun
    latencies: list[float] = field(default_factory=list)  # seconds
    errors: Counter[str] = field(default_factory=Counter)
    reply_tokens: list[int] = field(default_factory=list)  # of the last reply of each worker
    requests: itertools.count[int] = field(default_factory=itertools.count)
    rewards: random.Random = field(default_factory=lambda: random.Random(0))
    name: str = field(default_factory=lambda: f"{time.time_ns():x}")

    async def post(self, url: str, key: str, body: Any) -> bytes:
        """The body of the answer; anything but 200 is an error."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        async with self.http.post(url, data=data, headers=headers) as answer:
            text = await answer.read()
            if answer.status != 200:
                raise ValueError(f"{answer.status} {text[:200]!r}")
            return text

    async def claim(self, worker: int) -> dict[str, Any]:
        """An episode of this worker's own."""
        for _ in range(4):  # others may be quicker for a whole step
            body = {"worker_id": f"w{worker}", "request_id": f"{self.name}-{next(self.requests)}", "wait_seconds": 30}
            answer = json.loads(await self.post(f"{self.url}/claim_episode", self.key, body))
            if answer["status"] == "claimed":
                episode: dict[str, Any] = answer["episode"]
                return episode
        raise ValueError(f"no episode: {answer['status']}")

    async def end(self, episode: dict[str, Any]) -> None:
        """Hand in a random reward."""
        body = {"episode_id": episode["episode_id"], "reward": self.rewards.random()}
        await self.post(f"{self.url}/end_episode", episode["api_key"], body)

    async def call(self, episode: dict[str, Any], body: bytes) -> bytes:
        """One model call."""
        text = await self.post(f"{episode['base_url']}/chat/completions", episode["api_key"], body)
        if b'"choices"' not in text:
            raise ValueError(f"not a completion: {text[:200]!r}")
        return text

    async def timed(self, work: Any) -> Any:
        """Await one piece of work, and count it; after an error, None."""
        start = time.perf_counter()
        try:
            result = await work
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
            await asyncio.sleep(RETRY_SECONDS)
            return None
        self.latencies.append(time.perf_counter() - start)
        return result


def chat_body(model: str) -> bytes:
    """What every call asks: two messages of 155 words together."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
    wanted = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "logprobs": True}
    return json.dumps({"model": model, "messages": messages, **wanted}).encode()


async def chat_worker(load: Load, episode: dict[str, Any]) -> None:
    """Call the model again and again, in one episode."""
    body, text = chat_body(episode["model"]), None
    while time.perf_counter() < load.stop:
        text = await load.timed(load.call(episode, body)) or text
    if text is not None:
        load.reply_tokens.append(json.loads(text)["usage"]["completion_tokens"])


async def episode_worker(load: Load, number: int, played: bool) -> None:
    """Claim and end episodes, with one call in each where they are `played`."""

    async def play() -> None:
        episode = await load.claim(number)
        if played:
            await load.call(episode, chat_body(episode["model"]))
        await load.end(episode)

    while time.perf_counter() < load.stop:
        await load.timed(play())


def usage(pid: int) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process and its children."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    cpu = sum(sum(process.cpu_times()[:2]) for process in family)
    return cpu, sum(process.memory_info().rss for process in family)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run; episodes that calls are made in are claimed before the clock starts."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as http:
        load = Load(arguments.url, arguments.key, http)
        numbers = range(arguments.workers)
        if arguments.work == "chat":
            episodes = await asyncio.gather(*(load.claim(number) for number in numbers))
            workers = [chat_worker(load, episode) for episode in episodes]
        else:
            workers = [episode_worker(load, number, arguments.work == "played") for number in numbers]
        cpu, rss = usage(arguments.pid)
        begin = time.perf_counter()
        load.stop = begin + arguments.seconds
        await asyncio.gather(*workers)
        wall = time.perf_counter() - begin
        cpu_after, rss_after = usage(arguments.pid)
        if arguments.work == "chat":
            await asyncio.gather(*(load.end(episode) for episode in episodes))
    return summary(load, wall, cpu_after - cpu, rss_after - rss)


def summary(load: Load, wall: float, cpu: float, grown: int) -> dict[str, Any]:
    """Rates, quantiles and the server's costs."""
    count, ordered = len(load.latencies), sorted(load.latencies)
    if not count:
        raise SystemExit(f"nothing was answered: {dict(load.errors)}")
    return {
        "count": count,
        "per_second": count / wall,
        "p50_ms": 1e3 * ordered[count // 2],
        "p99_ms": 1e3 * ordered[min(count - 1, int(0.99 * count))],
        "server_cpu_ms": 1e3 * cpu / count,
        "server_cores": cpu / wall,
        "rss_kib": grown / 1024 / count,
        "reply_tokens": sum(load.reply_tokens) / max(1, len(load.reply_tokens)),
        "errors": sum(load.errors.values()),
        "error_kinds": dict(load.errors),
    }


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["chat", "episodes", "played"])
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("pid", type=int)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    print(json.dumps(uvloop.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
