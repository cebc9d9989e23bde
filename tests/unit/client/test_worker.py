"""The worker's loop on a client that answers as a test says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from palestra.client import Worker
from palestra.client.episode import Episode
from palestra.errors import EpisodeLeaseExpired, TooManyRequests
from unit.client.building import EPISODE

LEASED = replace(EPISODE, lease_seconds=0.03)  # a heartbeat every tenth of a second, which is the most


class Client:
    """Hands out one episode; each heartbeat is answered with the next of `answers`, and then with none."""

    def __init__(self, *answers: Exception | None) -> None:
        self.episodes, self.answers, self.beats = [LEASED], list(answers), 0

    async def begin_episode(self) -> Episode | None:
        return self.episodes.pop() if self.episodes else None

    async def heartbeat(self, episode: Episode) -> None:
        self.beats += 1
        if self.answers and (error := self.answers.pop(0)) is not None:
            raise error

    async def end_episode(self, episode: Episode, reward: float, **more) -> None: ...


async def beats_of(client: Client, seconds: float = 60.0, enough: int = 10**9) -> int:
    async def rollout(task, policy) -> float:
        try:
            async with asyncio.timeout(seconds):
                while client.beats < enough:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        return 1.0

    await Worker(client, rollout, 1).run()
    return client.beats


async def test_a_lease_is_renewed_also_after_an_answer_that_the_server_could_not_give():
    assert await beats_of(Client(None, TooManyRequests("slow down"), TooManyRequests("slow down")), enough=5) == 5


@pytest.mark.parametrize("before", [0, 2])
async def test_a_lease_that_is_lost_is_not_renewed(before):
    client = Client(*[None] * before, EpisodeLeaseExpired("it is another worker's"))
    assert await beats_of(client, seconds=1.0, enough=before + 2) == before + 1
