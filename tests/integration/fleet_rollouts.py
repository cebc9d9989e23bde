"""Rollout functions for `palestra worker`; what they leave in FOLDER is what the tests look at."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import openai

FOLDER = Path(os.environ.get("FLEET_FOLDER", "."))


async def rollout(task, policy):
    """One call; then a reward."""
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        reply = await client.chat.completions.create(
            model=policy.model, messages=[{"role": "user", "content": task["text"]}]
        )
    return float(len(reply.choices[0].message.content))


async def crashes_once(task, policy):
    """The first time, the process dies in the middle of an episode."""
    marker = FOLDER / "crashed"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return await rollout(task, policy)


async def crashes(task, policy):
    """Every time."""
    os._exit(9)


async def slow(task, policy):
    """Says that it has begun, and takes until it is released."""
    (FOLDER / f"begun-{os.urandom(4).hex()}").touch()
    while not (FOLDER / "release").exists():
        await asyncio.sleep(0.01)
    return await rollout(task, policy)
