from __future__ import annotations

import asyncio
import sqlite3
import threading

import pytest

from palestra.database import Notifier
from palestra.errors import EpisodeLeaseExpired, StoreError
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.states import EpisodeState
from unit.building import TASK, make_chat, open_store

EPISODE = "train-000000-00"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(notifier: Notifier) -> asyncio.Task[None]:
    return asyncio.ensure_future(notifier.wait(60.0, notifier.count))


# Who is told what


async def test_registering_and_giving_back_ring_that_an_episode_is_available(store):
    task = waiting(store.episodes.available)
    await settle()
    await store.groups.register("train", 0, 1, TASK, 1)
    await asyncio.wait_for(task, 1)
    claim = await store.episodes.claim("w", "r", None)
    task = waiting(store.episodes.available)
    await settle()
    await store.episodes.abort(EPISODE, claim.fence, "", discard=False)
    await asyncio.wait_for(task, 1)


@pytest.mark.parametrize("how", ["end", "discard"])
async def test_ending_and_discarding_ring_that_something_is_settled(store, how):
    await store.groups.register("train", 0, 1, TASK, 1)
    await store.episodes.claim("w", "r", None)
    task = waiting(store.groups.open.settled)
    await settle()
    if how == "end":
        await store.episodes.end(EPISODE, 1, EpisodeEnd(rewards={"agent": 1.0}))
    else:
        await store.episodes.abort(EPISODE, 1, "", discard=True)
    await asyncio.wait_for(task, 1)


@pytest.mark.parametrize("how", ["end", "give back", "discard", "expire"])
async def test_whoever_watches_leases_is_told_once_when_one_is_over(store, clock, how):
    told: list[tuple[str, int]] = []
    store.episodes.on_lease_over.append(lambda e, f: told.append((e, f)))
    await store.groups.register("train", 0, 1, TASK, 1)
    await store.episodes.claim("w", "r", None)
    assert told == []
    if how == "end":
        for _ in range(2):
            await store.episodes.end(EPISODE, 1, EpisodeEnd(rewards={"agent": 1.0}))
    elif how == "expire":
        clock.advance(60)
        await store.episodes.expire_leases()
    else:
        await store.episodes.abort(EPISODE, 1, "", discard=how == "discard")
    assert told == [(EPISODE, 1)]
    assert len(store.leases) == 0


# Callers that go away in the middle


class Busy:
    """Keeps the writer busy until the block is left."""

    def __init__(self, store) -> None:
        self._store, self._reached, self._go = store, threading.Event(), threading.Event()

    def _run(self, connection) -> None:
        self._reached.set()
        assert self._go.wait(10)

    async def __aenter__(self):
        self._task = asyncio.ensure_future(self._store.db.write(self._run))
        await asyncio.to_thread(self._reached.wait, 10)

    async def __aexit__(self, *_) -> None:
        self._go.set()
        await self._task
        await self._store.db.write(lambda c: None)
        await settle()


async def gone_in_the_middle_of(store, work) -> None:
    async with Busy(store):
        task = asyncio.ensure_future(work)
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_episode_claimed_by_a_worker_that_died_meanwhile_is_given_back_after_its_lease(store, clock):
    """The worker is killed in its long poll while its claim is being committed: nobody will ever end it."""
    await store.groups.register("train", 0, 1, TASK, 1)
    await gone_in_the_middle_of(store, store.episodes.claim("w", "r", None))
    assert (await store.episodes.get(EPISODE)).state is EpisodeState.CLAIMED
    clock.advance(60)
    assert await store.episodes.expire_leases() == 1
    assert (await store.episodes.claim("w", "s", None)).fence == 2


@pytest.mark.parametrize("how", ["end", "give back"])
async def test_an_end_whose_caller_went_away_meanwhile_is_an_end_like_any_other(store, clock, how):
    told: list[tuple[str, int]] = []
    store.episodes.on_lease_over.append(lambda e, f: told.append((e, f)))
    await store.groups.register_many("train", 1, {0: (TASK,), 1: (TASK,)}, 1)
    for request in "rs":
        await store.episodes.claim("w", request, None)
    settled, available = waiting(store.groups.open.settled), waiting(store.episodes.available)
    if how == "end":
        await gone_in_the_middle_of(store, store.episodes.end(EPISODE, 1, EpisodeEnd(rewards={"agent": 1.0})))
        await asyncio.wait_for(settled, 1)
        available.cancel()
    else:
        await gone_in_the_middle_of(store, store.episodes.abort(EPISODE, 1, "", discard=False))
        await asyncio.wait_for(available, 1)
        settled.cancel()
    assert told == [(EPISODE, 1)]
    clock.advance(60)
    assert await store.episodes.expire_leases() == 1  # the other one; the first is over
    assert told[1:] == [("train-000001-00", 1)]


async def test_one_lease_that_can_not_be_given_back_does_not_keep_the_others(store, clock):
    """A worker ends its episode at the moment at which the lease runs out."""
    await store.groups.register("train", 0, 1, TASK, 3)
    for request in "rst":
        await store.episodes.claim("w", request, None)
    clock.advance(60)
    async with Busy(store):
        ending = asyncio.ensure_future(store.episodes.end(EPISODE, 1, EpisodeEnd(rewards={"agent": 1.0})))
        await settle()
        expiring = asyncio.ensure_future(store.episodes.expire_leases())
        await settle()
    assert await ending
    assert await expiring == 2
    assert len(store.leases) == 0
    states = [(await store.episodes.get(f"train-000000-0{i}")).state for i in range(3)]
    assert states == [EpisodeState.COMPLETED, EpisodeState.REGISTERED, EpisodeState.REGISTERED]


async def test_a_call_that_arrives_after_its_lease_is_not_recorded(store):
    await store.groups.register("train", 0, 1, TASK, 1)
    await store.episodes.claim("w", "r", None)
    await store.calls.append(make_chat(index=0))
    await store.episodes.abort(EPISODE, 1, "", discard=False)
    with pytest.raises(EpisodeLeaseExpired):
        await store.calls.append(make_chat(index=1))
    await store.episodes.claim("w", "s", None)
    with pytest.raises(EpisodeLeaseExpired):
        await store.calls.append(make_chat(index=1))
    assert (await store.calls.of_lease(EPISODE, 2))[1] == ()
    assert len((await store.calls.of_lease(EPISODE, 1))[1]) == 1
    (trajectory,) = await store.calls.trajectories([EPISODE])
    assert trajectory.chats == ()  # what the former holder sampled is nobody's


# Files


def test_a_file_that_is_no_database_is_a_store_error(tmp_path):
    (tmp_path / "run.db").write_bytes(b"not a database, but long enough to be looked at as one" * 100)
    with pytest.raises(StoreError, match=r"run\.db"):
        open_store(tmp_path)


def test_a_database_that_was_cut_or_overwritten_is_a_store_error(tmp_path):
    with open_store(tmp_path):
        pass
    path = tmp_path / "run.db"
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    with pytest.raises(StoreError, match=r"run\.db"):
        open_store(tmp_path)


def test_a_database_of_something_else_is_a_store_error_and_left_alone(tmp_path):
    with sqlite3.connect(tmp_path / "run.db") as other:
        other.execute("CREATE TABLE episodes (mine TEXT)")
        other.execute("INSERT INTO episodes VALUES ('precious')")
    other.close()
    with pytest.raises(StoreError, match=r"run\.db"):
        open_store(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as other:
        assert other.execute("SELECT mine FROM episodes").fetchall() == [("precious",)]
    other.close()


async def test_a_file_that_was_away_for_a_commit_is_lost_also_when_it_is_back(tmp_path):
    path = tmp_path / "run.db"
    store = open_store(tmp_path)
    path.rename(tmp_path / "away.db")
    with pytest.raises(StoreError, match="moved"):
        await store.tasks.seal()
    (tmp_path / "away.db").rename(path)
    with pytest.raises(StoreError, match="moved"):
        await store.tasks.seal()
    async with asyncio.timeout(10):
        assert "moved" in str(await store.db.lost())
    store.close()


async def test_after_closing_nothing_is_written(tmp_path):
    store = open_store(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.groups.register("train", 0, 1, TASK, 1)


async def test_after_closing_nothing_is_read_either(tmp_path):
    """A request may outlive the store; what it gets is an answer, and no traceback of an executor."""
    store = open_store(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.episodes.counts()
