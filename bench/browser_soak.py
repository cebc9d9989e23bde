"""Episodes of thirty MiniWoB pages while Chromium is killed again and again: no reward may come from a failure.

    python bench/browser_soak.py --episodes 1000 --kills 20 --together 8

A scripted agent clicks on what a seed says, so an episode has one right reward. All are played twice: in peace,
and while Chromium is killed; an episode that fails is played again. Printed is how many rewards differ, how many
attempts failed, and which processes and profiles are left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from palestra import text_message
from palestra.errors import EnvironmentFailed
from palestra_screens import MiniWoB
from palestra_screens.browser.miniwob import miniwob_tasks

MAX_ATTEMPTS = 20
CLEAN_SECONDS = 30.0  # until processes that were killed, and their profiles, have to be gone


async def play(environment: MiniWoB, task: dict[str, Any]) -> float:
    """Play an episode with actions that its task alone decides."""
    source = random.Random(task["id"])
    text, _ = await environment.reset(task)
    total, over, truncated = 0.0, False, False
    while not (over or truncated):
        numbers = re.findall(r"^\[(\d+)\]", text, re.MULTILINE) or ["1"]
        action = f"click {source.choice(numbers)}"
        messages, reward, over, truncated, _ = await environment.step_message(text_message("assistant", action))
        total += float(reward)
        text = messages[-1].text if messages else ""
    return total


async def played(tasks: list[dict[str, Any]], together: int, kills: int) -> dict[str, Any]:
    """Play all tasks, and kill Chromium at even distances meanwhile."""
    rewards: dict[str, float] = {}
    failed, killed = 0, 0
    waiting = iter(tasks)
    environments = [MiniWoB(actions="text", max_steps=3) for _ in range(together)]
    for one in environments:
        await one.setup()

    async def work(environment: MiniWoB) -> None:
        nonlocal failed
        for task in waiting:
            for _ in range(MAX_ATTEMPTS):
                try:
                    rewards[task["id"]] = await play(environment, task)
                    break
                except EnvironmentFailed:
                    failed += 1

    async def kill() -> None:
        nonlocal killed
        while killed < kills:
            if len(rewards) < (killed + 1) * len(tasks) / (kills + 1):
                await asyncio.sleep(0.01)
                continue
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    command = process.cmdline()
                    if "--remote-debugging-pipe" in command and not any("--type=" in part for part in command):
                        process.send_signal(signal.SIGKILL)
                        killed += 1
                        break

    started = time.monotonic()
    killing = asyncio.ensure_future(kill())
    await asyncio.gather(*map(work, environments))
    killing.cancel()
    seconds = time.monotonic() - started
    for one in environments:
        await one.close()
    counts = {"failed attempts": failed, "kills": killed}
    return {"rewards": rewards, "seconds": round(seconds, 1), **counts}


def left() -> dict[str, int]:
    """Return what is left of browsers: living processes below this one, and profiles."""
    alive = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    profiles = Path(tempfile.gettempdir()).glob("playwright_chromiumdev_profile-*")
    return {"processes": len(alive), "profiles": len(list(profiles))}


async def soak(episodes: int, kills: int, together: int) -> dict[str, Any]:
    """Return what happened in both runs, and what is left."""
    tasks, before = miniwob_tasks(None, "train", episodes, 0), left()["profiles"]
    peace = await played(tasks, together, 0)
    print(f"in peace: {episodes} episodes in {peace['seconds']} s", file=sys.stderr)
    war = await played(tasks, together, kills)
    until = time.monotonic() + CLEAN_SECONDS
    while time.monotonic() < until and any({**left(), "profiles": left()["profiles"] - before}.values()):
        await asyncio.sleep(0.5)
    right, found = peace.pop("rewards"), war.pop("rewards")
    return {
        "episodes": len(found),
        "pages": len({task["page"] for task in tasks}),
        "rewards that differ": [name for name in right if right[name] != found.get(name)],
        "mean reward": round(sum(found.values()) / len(found), 3),
        "in peace": peace,
        "with kills": war,
        "left": {**left(), "profiles": left()["profiles"] - before},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--together", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:  # of its own, so that profiles of other browsers do not count
        os.environ["TMPDIR"] = tempfile.tempdir = place
        print(json.dumps(asyncio.run(soak(arguments.episodes, arguments.kills, arguments.together)), indent=1))
