"""Measures the longest pauses of a job's data plane over the ends of its steps.

    python bench/step_end.py [--groups 1024] [--size 8] [--steps 3] [--staleness 0]

A job in this process plays one call an episode with the fake engine, commits all to a store on disk (FULL), and trains
with a trainer that only hashes. Meanwhile three tasks look every few milliseconds how late the event loop is, how long
a commit takes, and how long a read takes. Prints one JSON line: the longest of each in ms; the longest time that the
loop's thread has computed between two looks, which other processes do not disturb; how often that was more than 20 ms;
and the longest time without an end of an episode in s, which contains the training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from palestra.config import parse_config
from palestra.envs import Environment
from palestra.http.server import tune_gc
from palestra.rollout import RolloutSpec
from palestra.runtime.local import local_job
from palestra.types.records import Task

LONG = 0.02  # seconds
PAUSE = 0.003  # seconds between two looks
ROOT = Path(__file__).parent.parent


class OneStep(Environment):
    """Asks once, and gives every other reply a reward, so that every group has something to teach."""

    blocking = False

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Ask."""
        return f"What is {task['a']} + {task['b']}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give a reward for what the fake engine has drawn."""
        return "", float(len(action) % 2), True, False, {}


async def timed(work: Callable[[], Awaitable[object]], found: list[float]) -> None:
    """Do some work every few milliseconds, and note how many seconds it took."""
    while True:
        began = time.perf_counter()
        await work()
        found.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE)


async def lateness(late: list[float], computed: list[float]) -> None:
    """Note how many seconds late the loop is, and how many its thread has computed since the last look."""
    while True:
        began, used = time.perf_counter(), time.thread_time()
        await asyncio.sleep(PAUSE)
        late.append(time.perf_counter() - began - PAUSE)
        computed.append(time.thread_time() - used)


async def measure(folder: Path, groups: int, size: int, steps: int, staleness: int) -> dict[str, float]:
    """Run a job, and return its longest pauses."""
    settings = {
        "name": "step-end",
        "run_dir": str(folder),
        "steps": steps,
        "server": {"port": 0},
        "engine": {"kind": "fake", "reply_tokens": 16},
        "evaluation": {"every_steps": 0},
        "rollout": {"groups_per_step": groups, "group_size": size, "max_staleness": staleness},
        "environment": {"max_concurrency": 256},
    }
    tasks = [Task(task_id=f"t{number}", data={"a": number, "b": number + 1}) for number in range(256)]
    late, computed, commits, reads, ends = (list[float]() for _ in range(5))
    spec = RolloutSpec(environment=OneStep)
    async with local_job(parse_config(settings), lambda kind, data: None, spec) as job:
        store = job.plane.store
        await store.tasks.push("train", tasks, "all")
        await store.tasks.seal()
        store.episodes.on_lease_over.append(lambda episode_id, fence: ends.append(time.perf_counter()))
        looking = [
            asyncio.ensure_future(lateness(late, computed)),
            asyncio.ensure_future(timed(lambda: store.log.set_fact("bench", "x"), commits)),
            asyncio.ensure_future(timed(lambda: store.log.fact("bench"), reads)),
        ]
        began = time.perf_counter()
        await job.run()
        seconds = time.perf_counter() - began
        for task in looking:
            task.cancel()
    return {
        "episodes_per_second": len(ends) / seconds,
        "late_ms": max(late) * 1000,
        "computed_ms": max(computed) * 1000,
        "computed_long": sum(seconds > LONG for seconds in computed),
        "commit_ms": max(commits) * 1000,
        "read_ms": max(reads) * 1000,
        "no_end_seconds": max(later - earlier for earlier, later in pairwise(ends)),
    }


def main() -> None:
    """Run."""
    tune_gc()  # as `palestra run` does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("groups", 1024), ("size", 8), ("steps", 3), ("staleness", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    (ROOT / "runs").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=ROOT / "runs") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        found = loop.run(measure(Path(folder), **vars(parser.parse_args())))
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
