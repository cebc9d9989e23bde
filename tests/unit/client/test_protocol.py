from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from palestra.client.episode import ModelEndpoint, RolloutResult
from palestra.client.protocol import (
    CHUNK_BYTES,
    CHUNK_TASKS,
    abort_call,
    claim_call,
    finish_call,
    heartbeat_call,
    push_calls,
    read_claim,
)
from palestra.client.task_files import task_source
from palestra.errors import InvalidRequest
from palestra.types.wire import ClaimAnswer
from unit.client.building import EPISODE


def test_an_endpoint_can_be_the_key_of_a_cache():
    endpoint = ModelEndpoint(base_url="http://h/v1", api_key="k", model="a", version="0.1", policies={"a": "0.1"})
    assert hash(endpoint) == hash(replace(endpoint))
    assert {endpoint: 1}[replace(endpoint)] == 1


def body(call) -> dict:
    return json.loads(call.body.model_dump_json())


def test_every_claim_has_a_request_id_of_its_own_and_time_to_be_answered():
    one, two = claim_call("w", 30.0), claim_call("w", None)
    assert body(one)["request_id"] != body(two)["request_id"]
    assert (body(one)["worker_id"], body(one)["allow_discard_timeout"]) == ("w", 30.0)
    assert one.timeout_seconds > body(one)["wait_seconds"]
    assert one.key is None


def claimed(**changes) -> ClaimAnswer:
    episode = {
        "episode_id": "e",
        "kind": "train",
        "task_id": "t",
        "task": {"q": 1},
        "base_url": "http://x/v1",
        "api_key": "k",
        "model": "m",
        "version": "0.3",
        "lease_seconds": 9.0,
    }
    return ClaimAnswer.model_validate({"status": "claimed", "job_state": "running", "episode": episode} | changes)


def test_a_claim_is_read_as_it_was_answered():
    episode, over = read_claim(claimed())
    assert not over
    assert (episode.episode_id, episode.task, episode.lease_seconds) == ("e", {"q": 1}, 9.0)
    assert (episode.base_url, episode.api_key, episode.model) == ("http://x/v1", "k", "m")
    assert read_claim(claimed(status="waiting", episode=None)) == (None, False)
    assert read_claim(claimed(status="finished", episode=None)) == (None, True)


@pytest.mark.parametrize(
    ("reward", "wanted"),
    [(1, 1.0), (0.25, 0.25), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.array(2.0), 2.0)],
)
def test_any_number_is_a_reward(reward, wanted):
    call = finish_call(EPISODE, reward)
    assert (body(call)["reward"], body(call)["rewards"]) == (wanted, None)
    assert call.key == "pe-key"
    assert body(finish_call(EPISODE, {"a": reward}, step_rewards=[reward], metadata={"x": 1})) == {
        "episode_id": "train-000000-00",
        "reward": None,
        "rewards": {"a": wanted},
        "step_rewards": [wanted],
        "metadata": {"x": 1},
    }


def test_named_rewards_take_the_place_of_a_reward_and_none_of_them_stays_none():
    found = body(finish_call(EPISODE, None, named_rewards={"right": True, "short": np.float32(0.5), "style": None}))
    assert (found["reward"], found["rewards"]) == (None, None)
    assert found["named_rewards"] == {"right": 1.0, "short": 0.5, "style": None}
    for reward, named in ((None, None), (1.0, {"right": 1.0}), (None, {}), (None, {"right": math.nan})):
        with pytest.raises(InvalidRequest):
            finish_call(EPISODE, reward, named_rewards=named)


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", None, [1], object()])
def test_what_is_no_finite_number_is_an_invalid_request(reward):
    """As `Client.end_episode` promises; the user is not shown how bodies are checked."""
    for given, by_step in ((reward, None), ({"a": reward}, None), (1.0, [reward])):
        with pytest.raises(InvalidRequest):
            finish_call(EPISODE, given, step_rewards=by_step)


@pytest.mark.parametrize("metadata", [{"x": math.nan}, {"x": object()}, {"x": 10**30}, {1: 2}])
def test_metadata_that_is_no_json_is_an_invalid_request(metadata):
    with pytest.raises(InvalidRequest):
        finish_call(EPISODE, 1.0, metadata=metadata)


def test_a_long_reason_is_cut():
    assert len(body(abort_call(EPISODE, "x" * 5000, discard=True))["reason"]) == 2000
    assert body(heartbeat_call(EPISODE)) == {"episode_id": "train-000000-00"}


def test_tasks_go_in_chunks_that_are_named_by_their_place_and_the_last_says_so():
    rows = [{"n": i} for i in range(CHUNK_TASKS + 1)]
    calls = list(push_calls({"validation": rows[:2], "train": rows}))
    assert [(c.body.split, c.body.chunk_id, len(c.body.tasks), c.body.final) for c in calls] == [
        ("validation", "validation-0", 2, False),
        ("train", "train-0", CHUNK_TASKS, False),
        ("train", f"train-{CHUNK_TASKS}", 1, True),
    ]
    assert [t.data for c in calls[1:] for t in c.body.tasks] == rows


def test_large_tasks_go_in_smaller_chunks():
    rows = [{"text": "x" * (CHUNK_BYTES // 3)} for _ in range(5)] + [{"text": "y" * 2 * CHUNK_BYTES}]
    calls = list(push_calls({"train": rows}))
    assert [len(c.body.tasks) for c in calls] == [2, 2, 1, 1]
    assert [c.body.chunk_id for c in calls] == ["train-0", "train-2", "train-4", "train-5"]
    assert [t.data for c in calls for t in c.body.tasks] == rows


@pytest.mark.parametrize("given", [7, "q1", None, "", 1.5, True, ["a"], {"a": 1}, "x" * 300])
def test_a_task_is_pushed_with_its_own_id_whatever_it_is(given):
    row = {"id": given, "q": "?"}
    (call,) = push_calls({"train": [row]})
    (task,) = call.body.tasks
    assert (task.id, task.data) == (None, {"id": given, "q": "?"})
    assert type(task.data["id"]) is type(given)
    assert row == {"id": given, "q": "?"}


def test_a_task_that_is_no_json_is_an_invalid_request():
    with pytest.raises(InvalidRequest):
        task_source([{"q": object()}], "tasks")


def test_rewards_of_timesteps_by_agent_say_whose_they_are():
    given = [{"a": 1}, {}, {"b": np.float32(-1.0), "a": 2.0}]
    found = body(finish_call(EPISODE, {"a": 3.0, "b": -1.0}, step_rewards=given))
    assert found["step_rewards"] == [1.0, 0.0, 1.0]
    assert found["agent_step_rewards"] == [[0, "a", 1.0], [2, "b", -1.0], [2, "a", 2.0]]
    for wrong in ([{"a": 1.0}, 0.5], [{"a": math.nan}], [{"a": None}], [{"": 1.0}]):
        with pytest.raises(InvalidRequest):
            finish_call(EPISODE, {"a": 1.0, "b": 0.0}, step_rewards=wrong)


def test_a_whole_result_is_handed_in_as_its_parts_are():
    parts = {
        "step_rewards": [{"a": 1.0}],
        "metadata": {"x": 1},
        "named_rewards": {"right": 1.0, "style": None},
        "truncated": True,
    }
    whole = RolloutResult(reward={"a": 1.0}, **parts)
    assert body(finish_call(EPISODE, whole)) == body(finish_call(EPISODE, {"a": 1.0}, **parts))
    for name, part in parts.items():
        with pytest.raises(InvalidRequest) as error:
            finish_call(EPISODE, RolloutResult(reward=1.0), **{name: part})
        assert error.value.field == name


@pytest.mark.parametrize(
    "unscored", [{}, {"reward": {"a": 1.0, "b": None}}, {"named_rewards": {"right": None}}, {"metadata": {"x": 1}}]
)
def test_a_whole_result_without_a_score_drops_the_episode(unscored):
    call = finish_call(EPISODE, RolloutResult(**unscored))
    assert (call.path, call.body.discard) == ("/abort_episode", True)
