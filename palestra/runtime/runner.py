"""A runner: plays the environment that a job names, in a process that loads neither torch nor ray."""

from __future__ import annotations

from palestra.client import AsyncClient, Worker
from palestra.envs.catalog import catalog_maker
from palestra.errors import ConfigError
from palestra.rollout import EnvironmentPlayer, RolloutSpec


async def play_environment(url: str, key: str, worker_id: str, concurrency: int) -> None:
    """Play episodes until the job is over.

    Args:
        worker_id: recorded with each episode.
        concurrency: number of concurrent episodes.

    Raises:
        ConfigError: the job names no environment.
        PalestraError: the server refuses the runner, or can't be reached for long.
    """
    async with AsyncClient(url, key, worker_id=worker_id) as client:
        facts = await client.facts()
        if facts.environment is None:
            raise ConfigError("the job names no environment (environment.name)")
        spec = RolloutSpec(environment=catalog_maker(facts.environment, facts.settings, facts.system))
        await Worker(client, EnvironmentPlayer(client, spec, facts), concurrency).run()
