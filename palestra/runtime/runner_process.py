"""Runners as processes of this machine: `start_runner` in the job, and the program of such a process.

python -m palestra.runtime.runner_process SOCKET URL NAME CONCURRENCY, with the key in PALESTRA_API_KEY.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from palestra.agents import named_agents
from palestra.client import AsyncClient, Worker
from palestra.envs.catalog import catalog_maker
from palestra.errors import ConfigError, PalestraError
from palestra.process.child import start_process, with_owner
from palestra.rollout import EnvironmentPlayer, RolloutSpec
from palestra.runtime.runner_fleet import RunnerDied, RunnerOrder


async def play_environment(url: str, key: str, worker_id: str, concurrency: int) -> None:
    """Play episodes until the job is over."""
    async with AsyncClient(url, key, worker_id=worker_id) as client:
        facts = await client.facts()
        if facts.environment is None:
            raise ConfigError("the job names no environment (environment.name)")
        spec = RolloutSpec(
            environment=catalog_maker(facts.environment, facts.settings, facts.system),
            agents=named_agents(facts.agent, facts.agent_settings),
        )
        await Worker(client, EnvironmentPlayer(client, spec, facts), concurrency).run()


KEY_VARIABLE = "PALESTRA_API_KEY"


async def start_runner(order: RunnerOrder, worker_id: str) -> None:
    """Run a runner as a process, until the job is over. See `RunnerStarter`."""
    words = (order.url, worker_id, str(order.concurrency))
    variables = {KEY_VARIABLE: order.key()}
    process = await start_process("palestra.runtime.runner_process", variables, *words, prints=True, computes=False)
    try:
        code = await process.code()
    finally:
        await process.end(0.0)
    if code:
        raise RunnerDied(await process.how_ended())


def _main() -> int:
    """Play until the job is over; return the exit code."""
    from palestra.terminal import say

    url, worker_id, concurrency = sys.argv[2:]
    # Ctrl-C reaches all processes of a terminal; the job decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with_owner(lambda _: os._exit(1))
    try:
        asyncio.run(play_environment(url, os.environ.pop(KEY_VARIABLE), worker_id, int(concurrency)))
    except PalestraError as error:
        say(f"{worker_id}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
