"""What is recorded of tokens when they were trained: each trained token once, in the place that its call has for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from palestra.config import RolloutConfig, parse_config
from palestra.learner.reporting import trained_calls
from palestra.store import calls as stored_calls
from palestra.store import open_run_store
from palestra.store.browsing import browse
from palestra.store.calls import TrainedCall, read_trained
from palestra.types.calls import PolicyVersion
from unit.building import make_chat, make_train_batch, make_trajectory, open_store
from unit.learner.scripted_job import ScriptedJob, config


def batch_of(*members):
    trajectories = [make_trajectory(0, sample, float(sample), chats) for sample, chats in enumerate(members)]
    algorithm = parse_config({"algorithm": {"name": "grpo"}}).algorithm
    return make_train_batch(trajectories, algorithm, 16, PolicyVersion(0, 0))


def numbered(batch):
    """The rows, each trained token with a number of its own as its logprob."""
    count = 0
    for row in batch.samples:
        values = np.full(len(row.ids), np.nan, np.float32)
        values[row.loss_mask] = -np.arange(count, count + row.loss_mask.sum(), dtype=np.float32)
        count += int(row.loss_mask.sum())
        yield row, values


def test_each_trained_token_is_there_once_in_the_place_of_its_call():
    name = "train-000000-01"
    first = make_chat(name, prompt=(1, 2, 3), completion=(10, 11, 12, 13))
    goes_on = make_chat(name, index=1, parent=first, prompt=(20, 21), completion=(30, 31))
    # Its prompt has only the beginning of the first reply, so two rows share the training of that reply.
    cut = make_chat(name, index=2, prompt=(1, 2, 3, 10, 11, 99), completion=(40,))
    rows = list(numbered(batch_of([make_chat("train-000000-00")], [first, goes_on, cut])))
    of_episode = [(row, known) for row, known in rows if row.episode_id == name]
    assert len(of_episode) == 2
    where = {float(known[at]): (row, at) for row, known in of_episode for at in np.flatnonzero(row.loss_mask)}
    found = {one.index: one for one in trained_calls(rows) if one.episode_id == name}
    values = []
    for chat in (first, goes_on, cut):
        one = found[chat.index]
        for place, value in enumerate(one.logprobs.tolist()):
            row, at = where[value]
            in_reply = one.start + place - chat.prompt_tokens
            assert (row.ids[at], row.calls[at]) == (chat.completion_ids[in_reply], chat.index)
            values.append(value)
    assert sorted(values) == sorted(where)
    assert len(values) == 7


def test_rows_that_train_more_than_what_was_sampled_are_left_out():
    rows = list(numbered(batch_of([make_chat("train-000000-00")], [make_chat("train-000000-01")])))
    assert len(trained_calls(rows)) == 2
    assert trained_calls((replace(row, targets=row.ids), values) for row, values in rows) == []


async def test_a_job_records_them_of_its_newest_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_calls, "KEPT_STEPS", 2)
    job = ScriptedJob(tmp_path, config())
    await job.run()
    steps = set[int]()
    with open_store(tmp_path) as store:
        manifests = [await store.log.manifest(step) for step in (1, 2, 3)]
        trajectories = {found.step: await store.calls.trajectories(found.episode_ids) for found in manifests}
    rewards = {t.episode.episode_id: t.episode.reward for members in trajectories.values() for t in members}
    with browse(tmp_path / "run.db") as connection:
        for step, members in trajectories.items():
            for trajectory in members:
                name = trajectory.episode.episode_id
                found = read_trained(connection, step, name)
                taught = len({reward for other, reward in rewards.items() if other[:-3] == name[:-3]}) > 1
                if step == 1 or not taught:  # only the newest two steps are kept, and of them what was trained
                    assert found == {}
                    continue
                steps.add(step)
                assert found.keys() == {chat.index for chat in trajectory.chats}
                for chat in trajectory.chats:  # the fake trainer's logprobs are those of its engine
                    assert found[chat.index].start == chat.prompt_tokens
                    assert np.array_equal(found[chat.index].logprobs, chat.logprobs)
    assert steps == {2, 3}


async def test_only_the_first_epoch_is_asked_for(tmp_path):
    asked = []
    job = ScriptedJob(tmp_path, config(algorithm={"epochs": 3}))
    really = job.trainer.forward_backward
    job.trainer.forward_backward = lambda *given: asked.append(given[4]) or really(*given)
    await job.run()
    assert asked == [True, False, False] * (len(asked) // 3)
    assert len(asked) >= 3


async def test_a_step_that_is_repeated_has_the_numbers_of_the_last_attempt(tmp_path):
    with open_run_store(tmp_path / "run.db", RolloutConfig(), synchronous="NORMAL") as store:
        for value in (-1.0, -2.0):
            values = np.array([value, np.nan, value / 3], np.float32)
            await store.trained.record(7, [TrainedCall(episode_id="e", index=4, start=9, logprobs=values)])
        with browse(tmp_path / "run.db") as connection:
            (found,) = read_trained(connection, 7, "e").values()
    assert (found.index, found.start) == (4, 9)
    assert np.array_equal(found.logprobs, values, equal_nan=True)
