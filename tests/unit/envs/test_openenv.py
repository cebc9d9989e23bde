"""Environments of servers of OpenEnv: actions by their schemas, rewards, and failures, none of which is a reward."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from palestra.config import parse_config
from palestra.envs import SerialEnvironment
from palestra.errors import (
    ConfigError,
    EnvironmentFailed,
    EpisodeForfeited,
    InvalidEnvironment,
    NotScored,
    TooManyRequests,
)
from palestra.runtime.tasks import named_environment
from palestra_inspect.environment_check import check_environment
from palestra_worlds import OpenEnvEnvironment
from unit.envs.openenv_server import CALL, MOVE, openenv
from unit.envs.playing import calls, play, says

pytestmark = pytest.mark.ci


async def played(environment: OpenEnvEnvironment, *actions, task=None):
    left = iter(actions)
    serial = SerialEnvironment(environment)
    await serial.setup()
    try:
        return await play(serial, task or {"id": "t", "seed": 7}, lambda observation: next(left))
    finally:
        await serial.close()


async def test_the_text_of_a_reply_is_the_one_field_of_an_action():
    async with openenv() as (fake, url):
        seen = await played(OpenEnvEnvironment(url, rules="Guess.", system="Be brief."), says("no"), says("yes"))
        assert [message.text for message in seen[0].content] == ["Be brief.", "Guess.\nguess 7"]
        assert seen[1].content[0].text == '{"guess": "no"}'
        assert [one.reward for one in seen] == [None, 0.0, 1.0]
        assert seen[-1].terminated
        assert fake.resets == [{"id": "t", "seed": 7}]
        assert fake.sessions == 0


async def test_an_action_that_the_schema_refuses_is_an_error_for_the_agent():
    async with openenv() as (_, url):
        seen = await played(OpenEnvEnvironment(url), says(""), says("yes"))
    assert (seen[1].content[0].text, seen[1].reward) == ("Error: guess: too short (VALIDATION_ERROR)", 0.0)
    assert seen[-1].reward == 1.0


async def test_actions_of_several_fields_are_json_or_calls_of_a_tool():
    async with openenv(MOVE) as (_, url):
        seen = await played(
            OpenEnvEnvironment(url), says("left"), says('{"x": 1, "y": 2}'), calls(("act", {"x": 3, "y": 4})),
            calls(("jump", {})), says('{"x": 5, "y": 6}'),
        )  # fmt: skip
    assert seen[0].tools[0]["function"]["parameters"]["required"] == ["x", "y"]
    assert [one.content[0].text for one in seen[1:]] == [
        "Error: the reply is not JSON.",
        '{"x": 1, "y": 2}',
        '{"x": 3, "y": 4}',
        "Error: there is no tool 'jump'; known are act.",
        '{"x": 5, "y": 6}',
    ]
    assert seen[3].content[0].role == "tool"


async def test_servers_whose_actions_are_calls_of_tools_offer_these_tools():
    async with openenv(CALL) as (_, url):
        seen = await played(OpenEnvEnvironment(url, max_steps=2), says("hello"), calls(("look", {})))
    assert [tool["function"]["name"] for tool in seen[0].tools] == ["look"]
    assert seen[1].content[0].text == "Error: call one of the tools."
    assert json.loads(seen[2].content[0].text) == {"type": "call_tool", "tool_name": "look", "arguments": {}}
    assert seen[2].truncated


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("drops", EpisodeForfeited, r"connection.*lost"),
        ("hangs", EpisodeForfeited, r"0.3"),
        ("raises", EpisodeForfeited, r"ZeroDivisionError.*EXECUTION_ERROR"),
        ("nonsense", EnvironmentFailed, r"message.*OpenEnv"),
        ("nan", InvalidEnvironment, "a reward is finite"),
        ("unpaid", NotScored, r"paid.*reward"),
    ],
)
async def test_a_failure_is_no_reward(fault, kind, words):
    async with openenv(fault=fault) as (fake, url):
        with pytest.raises(kind, match=words):
            await played(OpenEnvEnvironment(url, reply_seconds=0.3), *(says("no"),) * 3)
        async with asyncio.timeout(5):
            while fake.sessions:
                await asyncio.sleep(0.01)


async def test_a_connection_that_is_lost_between_two_episodes_costs_nothing():
    async with openenv(fault="drops") as (fake, url):
        environment = OpenEnvEnvironment(url, reply_seconds=1)
        await environment.setup()
        await environment.reset({"seed": 1})
        await environment.step("no")
        with pytest.raises(EpisodeForfeited):
            await environment.step("no")
        fake.fault = ""
        await environment.reset({"seed": 2})
        assert (await environment.step("yes"))[1:3] == (1.0, True)
        await environment.close()


async def test_a_full_server_is_waited_for_but_not_for_ever():
    async with openenv() as (fake, url):
        fake.room = 0
        environment = OpenEnvEnvironment(url, wait_seconds=0.1)
        with pytest.raises(TooManyRequests, match="sessions of"):
            await environment.setup()
        fake.room = 1
        await environment.setup()
        await environment.close()


async def test_what_is_no_server_of_openenv_says_so_in_a_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(EnvironmentFailed, match=r"OpenEnv.*reached"):
        await OpenEnvEnvironment(f"http://127.0.0.1:{port}").setup()
    async with openenv(fault="other") as (_, url):
        with pytest.raises(EnvironmentFailed, match=r"OpenEnv.*server"):
            await OpenEnvEnvironment(url).setup()
    async with openenv() as (_, url):
        with pytest.raises(ConfigError, match=r"field.*'word'"):
            await OpenEnvEnvironment(url, action_field="word").setup()


async def test_it_keeps_to_what_environments_have_to_do():
    async with openenv() as (_, url):
        await asyncio.to_thread(check_environment, lambda: OpenEnvEnvironment(url), [{"seed": 1}, {"seed": 2}])


def test_a_job_names_the_protocol_of_its_server(monkeypatch):
    monkeypatch.delenv("PALESTRA_ENVIRONMENT_KEY", raising=False)
    given = {"url": "http://127.0.0.1:1", "protocol": "openenv", "settings": {"max_steps": 4}, "system": "Play."}
    made = named_environment(parse_config({"environment": given}))()
    assert isinstance(made, OpenEnvEnvironment)
    assert (made.max_steps, made.system) == (4, "Play.")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"protocol": "openenv"}, "give environment.url"),
        ({"url": "http://127.0.0.1:1", "protocol": "openenv", "settings": {"steps": 4}}, "no 'steps'"),
        ({"url": "http://127.0.0.1:1", "protocol": "nemo-gym", "settings": {"max_steps": 0}}, "max_steps"),
        ({"url": "127.0.0.1:1", "protocol": "nemo-gym"}, "no URL"),
    ],
)
def test_wrong_settings_of_a_partner_are_refused_at_once(given, words):
    with pytest.raises(ConfigError, match=words):
        named_environment(parse_config({"environment": given}))
