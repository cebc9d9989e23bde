from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from palestra.errors import EpisodeEnded, EpisodeLeaseExpired, InvalidRequest, NotFound
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.calls import TopTokens
from palestra.types.messages import text_message
from unit.building import TASK, make_chat

EPISODE = "train-000000-00"


async def claimed(store, size: int = 1):
    await store.groups.register("train", 0, 1, TASK, size)
    return await store.episodes.claim("w", "r", None)


async def test_calls_come_back_in_order_of_index(store):
    await claimed(store)
    for index in (2, 0, 1):
        await store.calls.append(make_chat(index=index, prompt=(index + 1,)))
    assert [(c.index, c.prompt_ids.tolist()) for c in (await store.calls.of_lease(EPISODE, 1))[1]] == [
        (0, [1]),
        (1, [2]),
        (2, [3]),
    ]


async def test_a_call_is_recorded_only_under_a_lease_that_stands(store):
    claim = await claimed(store)
    with pytest.raises(EpisodeLeaseExpired):
        await store.calls.append(make_chat(fence=2))
    with pytest.raises(NotFound):
        await store.calls.append(make_chat(episode_id="nope"))
    await store.episodes.end(EPISODE, claim.fence, EpisodeEnd(rewards={"agent": 1.0}))
    with pytest.raises(EpisodeEnded):
        await store.calls.append(make_chat())
    assert (await store.calls.of_lease(EPISODE, 1))[1] == ()


async def test_a_call_can_not_be_recorded_twice(store):
    await claimed(store)
    await store.calls.append(make_chat())
    with pytest.raises(Exception, match="UNIQUE"):
        await store.calls.append(make_chat())
    assert len((await store.calls.of_lease(EPISODE, 1))[1]) == 1


async def test_stored_bytes_grow_linearly_over_200_turns(store, tmp_path):
    """Each turn adds as much as the one before, though its prompt holds all turns so far."""
    await claimed(store)
    draw = np.random.default_rng(0)
    parent, sizes = None, {}
    for index in range(200):
        chat = make_chat(
            index=index,
            parent=parent,
            prompt=draw.integers(0, 49152, 30),
            completion=draw.integers(0, 49152, 20),
            messages=(text_message("user", "x" * 100),),
        )
        await store.calls.append(chat)
        parent = chat
    assert parent is not None
    with sqlite3.connect(tmp_path / "run.db") as db:
        columns = ("messages", "reply", "prompt_tail", "completion", "logprobs", "versions")
        total = " + ".join(f"length({c})" for c in columns)
        sizes = dict(db.execute(f"SELECT idx, {total} FROM chats"))
    db.close()
    early, late = (sum(sizes[i] for i in range(a, a + 50)) for a in (0, 150))
    assert late < early * 1.05
    (*_, last) = (await store.calls.of_lease(EPISODE, 1))[1]
    assert last.prompt_ids.tolist() == parent.prompt_ids.tolist()
    assert last.messages == parent.messages


async def test_trajectories_come_in_the_order_asked_for_with_the_calls_of_the_last_lease(store):
    await claimed(store, size=3)
    await store.calls.append(make_chat(prompt=(1,)))
    await store.episodes.abort(EPISODE, 1, "", discard=False)
    for request in "stu":
        await store.episodes.claim("w", request, None)
    await store.calls.append(make_chat(fence=2, prompt=(2,)))
    await store.calls.append(make_chat(fence=1, episode_id="train-000000-02", prompt=(3,)))
    found = await store.calls.trajectories(["train-000000-02", EPISODE, "train-000000-01"])
    assert [t.episode.episode_id[-2:] for t in found] == ["02", "00", "01"]
    assert [[c.prompt_ids.tolist() for c in t.chats] for t in found] == [[[3]], [[2]], []]
    with pytest.raises(NotFound, match="'x'"):
        await store.calls.trajectories([EPISODE, "x"])
    assert await store.calls.trajectories([]) == []


async def test_top_logprobs_are_read_for_answers_and_not_for_training(store):
    await claimed(store)
    chat = make_chat(completion=(5, 6))
    ids, logprobs = np.arange(6, dtype=np.int32).reshape(2, 3), np.full((2, 3), -0.25, np.float32)
    chat.top = TopTokens(ids, logprobs)
    await store.calls.append(chat)
    ((read,), (trajectory,)) = (await store.calls.of_lease(EPISODE, 1))[1], await store.calls.trajectories([EPISODE])
    assert read.top.rows() == chat.top.rows()
    assert trajectory.chats[0].top is None
    assert trajectory.chats[0].completion_ids.tolist() == [5, 6]


async def test_more_trajectories_than_sqlite_binds_values(store):
    await store.groups.register("train", 0, 1, TASK, 99)
    for group in range(1, 12):
        await store.groups.register("train", group, 1, TASK, 99)
    names = [f"train-{g:06d}-{s:02d}" for g in range(12) for s in range(99)]
    assert [t.episode.episode_id for t in await store.calls.trajectories(names)] == names


async def test_calls_of_one_time_step_are_one_step_and_rewards_are_put_beside_them(store):
    claim = await claimed(store)
    for index, step in enumerate((0, 0, 1, 3)):
        await store.calls.append(make_chat(index=index, time_step=step))
    (running,) = await store.calls.trajectories([EPISODE])
    assert not any(step.terminated for step in running.steps)
    with pytest.raises(InvalidRequest, match=r"3.*TimeSteps.*0.*3"):
        await store.episodes.end(EPISODE, claim.fence, EpisodeEnd(rewards={"agent": 1.0}, step_rewards=[0.1, 0.2, 0.3]))
    await store.episodes.end(
        EPISODE, claim.fence, EpisodeEnd(rewards={"agent": 1.0}, step_rewards=[0.1, 0.2, 0.3, 0.4, 0.5])
    )
    (done,) = await store.calls.trajectories([EPISODE])
    assert [(s.index, len(s.chats), s.reward) for s in done.steps] == [(0, 2, 0.1), (1, 1, 0.2), (3, 1, 0.4)]
    assert [s.terminated for s in done.steps] == [False, False, True]
