"""A lease is renewed while its episode is worked on, and no longer; who holds what is told."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Iterator

import openai
import pytest
from servers import KEY, PALESTRA, SCRIPTED, Job, Plane, until

from palestra import AsyncClient, Client
from palestra.client import Episode
from palestra.errors import EpisodeLeaseExpired, InvalidRequest

LEASE_SECONDS = 0.6
PERIODS = 4  # of a lease, that a block stays open


@pytest.fixture
def lease_seconds() -> float:
    return LEASE_SECONDS


@pytest.fixture
def job(tmp_path, lease_seconds) -> Iterator[Job]:
    settings = SCRIPTED | {"rollout": {**SCRIPTED["rollout"], "lease_seconds": lease_seconds, "max_attempts": 100}}
    with Job(tmp_path, settings | {"evaluation": {"every_steps": 0}}) as made:
        made.start()
        yield made


@pytest.fixture
def plane(job) -> Iterator[Plane]:
    with Plane(job.url) as made:
        yield made


@pytest.fixture
def client(job) -> Iterator[Client]:
    with Client(job.url, KEY, worker_id="mine", retry_seconds=5.0) as made:
        yield made


def claimed(plane: Plane) -> int:
    return int(plane.status()["episodes"]["claimed"])


def begun(client: Client) -> Episode:
    episode = client.begin_episode()
    assert episode is not None
    return episode


@pytest.mark.slow
@pytest.mark.parametrize("lease_seconds", [2.0])
def test_what_a_thread_had_claimed_that_died_is_given_back_though_its_process_lives(client, plane):
    def dies() -> None:
        begun(client)

    thread = threading.Thread(target=dies)
    thread.start()
    thread.join()
    assert claimed(plane) == 1
    until(lambda: claimed(plane) == 0, "the lease of the thread that died has run out", 15.0)


@pytest.mark.slow
def test_a_block_holds_its_episode_for_as_long_as_it_is_open(client, job):
    with client.episode() as episode:
        assert episode is not None
        time.sleep(PERIODS * LEASE_SECONDS)
        episode.reward = 1.0
    (row,) = job.query("SELECT state, fence FROM episodes WHERE episode_id = ?", episode.episode_id)
    assert tuple(row) == ("completed", 1)


@pytest.mark.slow
async def test_an_asynchronous_block_does_too(job):
    async with AsyncClient(job.url, KEY) as client, client.episode() as episode:
        assert episode is not None
        await asyncio.sleep(PERIODS * LEASE_SECONDS)
        episode.reward = 1.0
    (row,) = job.query("SELECT state, fence FROM episodes WHERE episode_id = ?", episode.episode_id)
    assert tuple(row) == ("completed", 1)


@pytest.mark.slow
def test_many_blocks_of_one_client_are_renewed_side_by_side(client, job):
    def plays() -> None:
        with client.episode() as episode:
            assert episode is not None
            time.sleep(PERIODS * LEASE_SECONDS)
            episode.reward = 1.0

    threads = [threading.Thread(target=plays) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {tuple(row) for row in job.query("SELECT state, fence FROM episodes WHERE fence > 0")} == {("completed", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_raises_gives_its_episode_back(client, plane, error):
    def plays() -> None:
        with client.episode():
            assert claimed(plane) == 1
            raise error("on purpose")

    with pytest.raises(error, match="on purpose"):
        plays()
    assert claimed(plane) == 0


@pytest.mark.slow
async def test_an_asynchronous_block_that_is_cancelled_gives_its_episode_back(job, plane):
    inside = asyncio.Event()

    async def plays(client: AsyncClient) -> None:
        async with client.episode():
            inside.set()
            await asyncio.Event().wait()

    async with AsyncClient(job.url, KEY) as client:
        task = asyncio.create_task(plays(client))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(claimed, plane) == 0


@pytest.mark.slow
def test_a_block_without_a_reward_says_so_and_gives_its_episode_back(client, plane):
    with pytest.raises(InvalidRequest, match=r"set episode\.reward"), client.episode():
        pass
    assert claimed(plane) == 0


@pytest.mark.slow
def test_what_a_block_raises_is_not_hidden_by_a_server_that_is_gone(client, job):
    def plays() -> None:
        with client.episode():
            job.close()
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        plays()


@pytest.mark.slow
def test_calls_and_heartbeats_renew_a_lease_and_the_answer_says_when_it_is_lost(client, job):
    episode = begun(client)
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as ai:
        until_later = time.monotonic() + PERIODS * LEASE_SECONDS
        while time.monotonic() < until_later:
            client.heartbeat(episode)
            time.sleep(LEASE_SECONDS / 4)
            ai.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "x"}])
            time.sleep(LEASE_SECONDS / 4)
    lost = "SELECT 1 FROM episodes WHERE episode_id = ? AND state = 'registered'"
    until(lambda: job.query(lost, episode.episode_id), "the lease has run out")
    with pytest.raises(EpisodeLeaseExpired):
        client.heartbeat(episode)
    with pytest.raises(EpisodeLeaseExpired):
        client.end_episode(episode, 1.0)


@pytest.mark.slow
def test_who_holds_what_since_when_is_told(tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        with Client(job.url, KEY, worker_id="sleeper") as client, Plane(job.url) as plane:
            first, second = begun(client), begun(client)
            until(lambda: all(h["heard_seconds"] > 0.5 for h in plane.status()["held_by"]), "some time has passed")
            client.heartbeat(first)
            status = plane.status()
            holders = status["held_by"]
            assert [(h["episode_id"], h["worker_id"]) for h in holders] == [
                (second.episode_id, "sleeper"),
                (first.episode_id, "sleeper"),
            ]
            assert holders[0]["heard_seconds"] > 0.5 > holders[1]["heard_seconds"]
            assert all(h["claimed_seconds"] >= h["heard_seconds"] for h in holders)
            assert status["workers"] == 1
            until(lambda: plane.status()["phase_due"] is not None, "the episodes of the phase are counted")
            assert (plane.status()["phase_done"], plane.status()["phase_due"]) == (0, 2)
            command = [str(PALESTRA), "episodes", str(job.run_dir), "--claimed"]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
            assert [line.split()[0] for line in shown.splitlines()[1:]] == [first.episode_id, second.episode_id]
            assert shown.count("sleeper") == 2
