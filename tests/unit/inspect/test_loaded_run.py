"""Rows of a loaded run, against the records that the run was written from."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

import palestra
from palestra.errors import NotFound
from palestra.store.calls import TrainedCall
from unit.building import open_store
from unit.dashboard.recorded import REWARDS, calls_of, record

RECORDED = [chat for group in REWARDS for sample in range(3) for chat in calls_of(group, sample)]


def column(rows, name):
    return [row[name] for row in rows]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(NotFound):
        palestra.load_run(tmp_path)


async def test_metrics_and_configuration_are_those_of_the_run_and_nothing_changes(tmp_path):
    await record(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    run = palestra.load_run(tmp_path)
    assert column(run.metrics(), "train/reward_mean") == [0.5, 0.625]
    assert run.config.name == "recorded"
    assert eval(repr(run), {"load_run": palestra.load_run}).path == run.path
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in before} == before


async def test_episodes_have_the_rewards_the_step_and_the_forks_of_the_records(tmp_path):
    await record(tmp_path)
    run = palestra.load_run(tmp_path)
    found = run.episodes("train")
    assert column(found, "episode_id") == [f"train-{g:06d}-{s:02d}" for g in REWARDS for s in range(3)]
    assert column(found, "reward") == [reward for rewards in REWARDS.values() for reward in rewards]
    assert set(column(found, "step")) == {5}
    assert column(found, "forks") == [0, 1, 0] * 3
    assert column(found, "tokens") == [5, 6, 7] * 3
    assert column(run.episodes("validation", None), "state") == ["registered"]
    assert run.episodes(None, None, 4) == []


async def test_calls_and_tokens_are_those_that_were_recorded(tmp_path):
    await record(tmp_path)
    run = palestra.load_run(tmp_path)
    calls, tokens = run.calls(kind="train"), run.tokens(kind="train")
    assert column(calls, "call") == [chat.index for chat in RECORDED]
    assert column(calls, "prompt_tokens") == [chat.prompt_tokens for chat in RECORDED]
    assert column(calls, "fork") == [None if chat.fork is None else "edited_message" for chat in RECORDED]
    assert column(tokens, "token") == np.concatenate([chat.completion_ids for chat in RECORDED]).tolist()
    assert column(tokens, "logprob") == np.concatenate([chat.logprobs for chat in RECORDED]).tolist()
    assert set(column(tokens, "trained_logprob")) == {None}
    assert column(tokens, "version")[-3:] == ["0.3", "0.4", "0.4"]
    one = run.tokens("train-000001-02")
    assert set(column(one, "episode_id")) == {"train-000001-02"}
    assert column(one, "position") == [0, 1, 2, 3, 0, 1, 2]


async def test_a_token_has_the_logprob_with_which_it_was_trained(tmp_path):
    await record(tmp_path)
    first, second = RECORDED[0], RECORDED[1]
    start = second.prompt_tokens + 1
    only = TrainedCall(
        episode_id=second.episode_id, index=second.index, start=start, logprobs=np.array([-0.125, np.nan], np.float32)
    )
    with open_store(tmp_path) as store:
        await store.trained.record(5, [only])
    found = column(palestra.load_run(tmp_path).tokens(kind="train"), "trained_logprob")
    wanted = [None] * len(found)
    wanted[len(first.completion_ids) + 1] = -0.125
    assert found == wanted


async def test_damaged_records_are_named_and_the_rest_is_there(tmp_path):
    await record(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("UPDATE episodes SET rewards = '{' WHERE episode_id = 'train-000000-01'")
        connection.execute("UPDATE chats SET completion = x'00' WHERE episode_id = 'train-000001-01'")
    run = palestra.load_run(tmp_path)
    assert [row["episode_id"] for row in run.episodes("train") if row["damaged"]] == ["train-000000-01"]
    found = {row["episode_id"] for row in run.tokens(kind="train")}
    assert len(found) == 7
    assert not found & {"train-000000-01", "train-000001-01"}
