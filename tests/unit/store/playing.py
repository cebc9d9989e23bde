"""Episodes registered, claimed and ended in a line."""

from __future__ import annotations

from palestra.store import RunStore
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.states import EpisodeState
from unit.building import TASK


async def register(store: RunStore, groups: int = 1, size: int = 2, kind="train") -> None:
    for index in range(groups):
        await store.groups.register(kind, index, 1, TASK, size)


async def claim(store: RunStore, request: str = "r", **kw):
    found = await store.episodes.claim("worker", request, kw.pop("lease", None), **kw)
    assert found is not None
    return found


async def end(store: RunStore, episode, reward: float = 1.0, **kw) -> bool:
    fence = kw.pop("fence", episode.fence)
    body = {"step_rewards": None, "metadata": {}} | kw
    return await store.episodes.end(
        episode.episode_id,
        fence,
        EpisodeEnd(rewards={"agent": reward}, step_rewards=body["step_rewards"], metadata=body["metadata"]),
    )


async def state(store: RunStore, episode_id: str) -> EpisodeState:
    return (await store.episodes.get(episode_id)).state
