"""Columns of a recorded run, against the records that it was written from."""

from __future__ import annotations

import json
import sqlite3

import numpy as np

from palestra.notebook.tables import call_columns, episode_columns, episodes_where, token_columns
from palestra.store.browsing import browse
from palestra.store.trained_tokens import TrainedCall
from unit.building import open_store
from unit.dashboard.recorded import REWARDS, calls_of, record


def read(folder, columns, *where):
    with browse(folder / "run.db") as connection:
        return columns(connection, episodes_where(*where))


async def test_episodes_have_the_rewards_the_step_and_the_forks_of_the_records(tmp_path):
    await record(tmp_path)
    found = read(tmp_path, episode_columns, "train", "completed", None)
    assert found["episode_id"] == [f"train-{g:06d}-{s:02d}" for g in REWARDS for s in range(3)]
    assert found["reward"] == [reward for rewards in REWARDS.values() for reward in rewards]
    assert set(found["step"]) == {5}
    assert found["forks"] == [0, 1, 0] * 3
    assert found["tokens"] == [5, 6, 7] * 3
    assert [json.loads(text) for text in found["rewards"]] == [{"agent": reward} for reward in found["reward"]]
    assert set(found["damaged"]) == {None}
    assert read(tmp_path, episode_columns, "validation", None, None)["state"] == ["registered"]
    assert read(tmp_path, episode_columns, None, None, 4)["episode_id"] == []


async def test_calls_and_tokens_are_those_that_were_recorded_bit_by_bit(tmp_path):
    await record(tmp_path)
    calls = read(tmp_path, call_columns, "train", None, None)
    tokens = read(tmp_path, token_columns, "train", None, None)
    recorded = [chat for group in REWARDS for sample in range(3) for chat in calls_of(group, sample)]
    assert calls["call"] == [chat.index for chat in recorded]
    assert calls["prompt_tokens"] == [chat.prompt_tokens for chat in recorded]
    assert calls["tokens"] == [len(chat.completion_ids) for chat in recorded]
    assert calls["fork"] == [None if chat.fork is None else "edited_message" for chat in recorded]
    assert np.array_equal(tokens["token"], np.concatenate([chat.completion_ids for chat in recorded]))
    assert np.array_equal(tokens["logprob"], np.concatenate([chat.logprobs for chat in recorded]))
    assert tokens["logprob"].dtype == np.float32
    assert np.isnan(tokens["trained_logprob"]).all()
    first, second = recorded[0], recorded[1]
    only = TrainedCall(
        episode_id=second.episode_id,
        index=second.index,
        start=second.prompt_tokens + 1,
        logprobs=np.array([-0.125], np.float32),
    )
    with open_store(tmp_path) as store:
        await store.trained.record(5, [only], 1)
    after = read(tmp_path, token_columns, "train", None, None)
    wanted = np.full(len(after["token"]), np.nan, np.float32)
    wanted[len(first.completion_ids) + 1] = -0.125
    assert np.array_equal(after["trained_logprob"], wanted, equal_nan=True)
    assert tokens["version"][-3:] == ["0.3", "0.4", "0.4"]
    assert {len(column) for column in tokens.values()} == {len(tokens["token"])}
    one = read(tmp_path, token_columns, None, None, None, "train-000001-02")
    assert set(one["episode_id"]) == {"train-000001-02"}
    assert one["place"].tolist() == [0, 1, 2, 3, 0, 1, 2]


async def test_what_is_damaged_is_said_and_the_rest_is_there(tmp_path):
    await record(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("UPDATE episodes SET rewards = '{' WHERE episode_id = 'train-000000-01'")
        connection.execute("UPDATE chats SET completion = x'00', versions = '[' WHERE episode_id = 'train-000001-01'")
    found = read(tmp_path, episode_columns, "train", None, None)
    assert [name for name, why in zip(found["episode_id"], found["damaged"], strict=True) if why] == [
        "train-000000-01",
        "train-000001-01",
    ]
    calls = read(tmp_path, call_columns, "train", None, None)
    assert sum(why is not None for why in calls["damaged"]) == 2
    assert len(calls["call"]) == 18
    assert "train-000001-01" not in read(tmp_path, token_columns, "train", None, None)["episode_id"]


async def test_a_run_without_episodes_has_columns_without_rows(tmp_path):
    await record(tmp_path)
    tokens = read(tmp_path, token_columns, "adhoc", None, None)
    assert {len(column) for column in tokens.values()} == {0}
    assert {len(column) for column in read(tmp_path, call_columns, "adhoc", None, None).values()} == {0}
