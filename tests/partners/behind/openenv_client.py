"""OpenEnv's own client at a server of `palestra env serve --dialect openenv`. Arguments: URL and key."""

from __future__ import annotations

import asyncio
import json
import sys

from openenv import GenericEnvClient


async def main(url: str, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with GenericEnvClient(base_url=url, headers=headers) as client:
        first = await client.reset(seed=5)
        asked = {"name": "calculator", "arguments": {"expression": "6 * 7"}}
        second = await client.step({"message": "", "tool_calls": [asked]})
        state = await client.state()
        last = await client.step({"message": "42"})
        try:
            await client.step({"message": "42"})
            late = "no error"
        except RuntimeError as error:
            late = str(error)
        again = await client.reset(seed=5)
    said = {
        "first": [first.observation["text"], first.reward, first.done],
        "second": [second.observation["text"], second.done],
        "steps": state["step_count"],
        "last": [last.reward, last.done],
        "late": late,
        "again": again.observation["text"],
    }
    print(json.dumps(said))


asyncio.run(main(*sys.argv[1:]))
