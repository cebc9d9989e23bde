"""Measure how many seconds an episode on a task of Harbor's format takes, with its solution in place of a model.

First one episode runs alone, then several run at once.

python bench/harbor.py [--task add] [--at-once 10]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from palestra_worlds.harbor import HarborEnvironment
from palestra_worlds.harbor.catalog import shipped_folder


async def episode(task: str) -> dict[str, float]:
    """Play one episode, and return the seconds of its parts."""
    environment = HarborEnvironment(shipped_folder())
    marks = [time.monotonic()]
    try:
        await environment.start({"id": task})
        marks.append(time.monotonic())
        await environment.solve()
        marks.append(time.monotonic())
        verdict = await environment.verdict()
        marks.append(time.monotonic())
    finally:
        await environment.close()
    marks.append(time.monotonic())
    assert verdict.total == 1.0
    parts = ("open", "solve", "verify", "close")
    return {name: b - a for name, a, b in zip(parts, marks, marks[1:], strict=False)} | {"all": marks[-1] - marks[0]}


async def measure(task: str, at_once: int) -> None:
    """Print the seconds of one episode alone, and of `at_once` episodes at once."""
    await episode(task)  # builds the image
    for count in (1, at_once):
        began = time.monotonic()
        found = await asyncio.gather(*(episode(task) for _ in range(count)))
        whole = time.monotonic() - began
        means = ", ".join(f"{name} {sum(one[name] for one in found) / count:.2f}" for name in found[0])
        print(f"{count} at once: {whole:.1f} s; mean of each: {means} s; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="add")
    parser.add_argument("--at-once", type=int, default=10)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.task, arguments.at_once))
