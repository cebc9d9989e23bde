"""Runs with episodes, without a job that plays them."""

from __future__ import annotations

from pathlib import Path

from palestra.config import SAVED_CONFIG, JobConfig, dump_config
from palestra.store import open_run_store
from palestra.store.lifecycle import EpisodeEnd
from unit.building import TASK, FakeClock, make_chat


async def play(run: Path, clock: FakeClock, *rewards: float, config: JobConfig | None = None) -> None:
    """Complete a group of training episodes with these rewards, a second after one another, and one of validation."""
    run.mkdir(parents=True)
    config = config or JobConfig()
    (run / SAVED_CONFIG).write_text(dump_config(config))
    store = open_run_store(run / "run.db", config.rollout, clock)
    try:
        await store.groups.register("validation", 0, 0, TASK, 1)
        episode = await store.episodes.claim("w", "validation", None)
        await store.episodes.end(episode.episode_id, episode.fence, EpisodeEnd(rewards={"agent": 9.0}))
        if rewards:
            await store.groups.register("train", 0, 1, TASK, len(rewards))
        for number, reward in enumerate(rewards):
            clock.advance(1)
            episode = await store.episodes.claim("w", str(number), None)
            await store.calls.append(make_chat(episode_id=episode.episode_id, completion=(1, 2, 3)))
            await store.episodes.end(episode.episode_id, episode.fence, EpisodeEnd(rewards={"agent": reward}))
    finally:
        store.close()
