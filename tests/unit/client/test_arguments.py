"""Numbers that make no sense are refused under their own name, before anything begins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from palestra import AsyncClient, Client, ControlClient, ModelAgent, RolloutSpec, ToolAgent, evaluate, train
from palestra.client.plain_values import checked_amount, checked_count
from palestra.client.worker import Worker
from palestra.envs import Arithmetic
from palestra.errors import ConfigError
from palestra.tools import ToolManager

NO_COUNTS = [0, -1, 1.5, 2.0, math.nan, "8", True, [1]]
NO_AMOUNTS = [-1, -0.5, math.nan, -math.inf, "8", True, [1], 10**400]
TASKS = [{"id": "a", "prompt": "1 + 1 =", "answer": "2"}]


def test_numbers_that_make_sense_are_taken_as_they_are():
    assert [checked_count("n", value) for value in (1, 64, np.int64(3))] == [1, 64, 3]
    assert checked_count("n", 0, 0) == 0
    assert [checked_amount("n", value) for value in (0, 0.5, np.float32(0.5), 3)] == [0.0, 0.5, 0.5, 3.0]
    assert checked_amount("n", math.inf, endless=True) == math.inf
    for value, more in ((math.inf, {}), (0, {"above_zero": True}), (math.nan, {"endless": True})):
        with pytest.raises(ConfigError, match="`n` is"):
            checked_amount("n", value, **more)


@pytest.mark.parametrize("value", NO_COUNTS)
def test_what_is_no_concurrency_is_refused_by_name(value):
    for begin in (train, evaluate):
        with pytest.raises(ConfigError, match=r"`concurrency`.*1"):
            begin(environment=Arithmetic, tasks=TASKS, concurrency=value, quiet=True)
    with pytest.raises(ConfigError, match="`concurrency` is"):
        Worker(None, lambda task, endpoint: 1.0, value)
    for agent in (ModelAgent, lambda max_tokens: ToolAgent([], max_tokens=max_tokens)):
        with pytest.raises(ConfigError, match="`max_tokens` is"):
            agent(max_tokens=value)
    with pytest.raises(ConfigError, match="`max_tokens` is"):
        RolloutSpec(environment=Arithmetic, max_tokens=value)


@pytest.mark.parametrize("value", NO_AMOUNTS)
def test_what_is_no_time_is_refused_by_name(value):
    for client in (Client, AsyncClient, ControlClient):
        with pytest.raises(ConfigError, match=r"`retry_seconds`.*0"):
            client("http://127.0.0.1:9", "key", retry_seconds=value)
    client = Client("http://127.0.0.1:9", "key")
    with client, pytest.raises(ConfigError, match=r"`allow_discard_timeout`.*0"):
        client.begin_episode(allow_discard_timeout=value)
    with pytest.raises(ConfigError, match="`temperature` is"):
        RolloutSpec(environment=Arithmetic, temperature=value)


@pytest.mark.parametrize("name", ["cpus", "gpus", "memory_gib", "restarts", "time_limit_seconds"])
@pytest.mark.parametrize("value", [-1, math.nan, "many"])
def test_what_no_job_can_have_is_refused_by_name(name, value):
    with ControlClient("http://127.0.0.1:9", "key") as control, pytest.raises(ConfigError, match=f"`{name}` is"):
        control.submit({}, **{name: value})


@pytest.mark.parametrize(
    "settings", [{"timeout_seconds": 0}, {"timeout_seconds": math.nan}, {"max_parallel": 0}, {"max_result_chars": 0}]
)
def test_limits_of_tools_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ToolManager([], **settings)
