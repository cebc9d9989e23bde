"""The worker's loop on a client that answers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from palestra.client import Worker
from palestra.client.episode import Episode
from palestra.errors import EpisodeLeaseExpired, JobOver, TooManyRequests
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


async def beats_of(client: Client, enough: int) -> int:
    """How many there are of an episode that goes on for a while after so many."""

    async def rollout(task, policy) -> float:
        async with asyncio.timeout(60):
            while client.beats < enough:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.35)
        return 1.0

    await Worker(client, rollout, 1).run()
    return client.beats


@pytest.mark.slow
async def test_a_lease_is_renewed_also_after_an_answer_that_the_server_could_not_give():
    client = Client(None, TooManyRequests("slow down"), TooManyRequests("slow down"))
    assert await beats_of(client, enough=5) >= 5


@pytest.mark.parametrize("before", [0, 2])
async def test_a_lease_that_is_lost_is_not_renewed(before):
    client = Client(*[None] * before, EpisodeLeaseExpired("it is another worker's"))
    assert await beats_of(client, enough=before + 1) == before + 1


@pytest.mark.parametrize("own", [False, True])
async def test_the_end_of_a_job_that_plays_along_ends_the_worker_and_gives_the_episode_back(own):
    client, released = Client(), []
    client.episodes *= 3

    async def abort_episode(episode: Episode, reason: str, *, discard: bool) -> None:
        released.append((episode.episode_id, discard))
        if own:
            client.episodes.clear()
            raise JobOver("this job is over, too")

    async def rollout(task, policy) -> float:
        raise JobOver("the game is over")

    client.abort_episode = abort_episode
    with contextlib.nullcontext() if own else pytest.raises(JobOver):
        await Worker(client, rollout, 1).run()
    assert released == [(LEASED.episode_id, False)]


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_rollout_that_would_end_the_worker_costs_its_own_episode_alone(kind, in_thread):
    client, released = Client(), []
    client.episodes *= 3

    async def abort_episode(episode: Episode, reason: str, *, discard: bool) -> None:
        released.append(reason)

    def rollout(task, policy) -> float:
        raise kind

    async def awaited(task, policy) -> float:
        raise kind

    client.abort_episode = abort_episode
    worker = Worker(client, rollout if in_thread else awaited, 1)
    await worker.run()
    assert worker.counts["failed"] == 3
    assert all(kind.__name__ in reason for reason in released)
