"""A worker that plays an environment and is killed at a message: `killed_player_process.py URL MESSAGE before|after`.

MESSAGE counts the requests of its life from 1; 0: it is not killed. `after`: when the answer has come.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import httpx2
from fleet_environments import Echo

from palestra.client import AsyncClient, Worker
from palestra.rollout import EnvironmentPlayer, RolloutSpec

URL, AT, WHEN = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sent, request = 0, httpx2.AsyncClient.request


async def killed(self, method, url, **more):
    """Send a request, and die before or after it."""
    global sent
    sent += not url.endswith("/rollout")
    dies = sent == AT and not url.endswith("/rollout")
    if dies and WHEN == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    answer = await request(self, method, url, **more)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


async def main() -> None:
    async with AsyncClient(URL) as client:
        player = EnvironmentPlayer(client, RolloutSpec(environment=Echo), await client.facts())
        await Worker(client, player, 1).run()


if __name__ == "__main__":
    httpx2.AsyncClient.request = killed
    asyncio.run(main())
