"""`OpenEnvEnvironment` with OpenEnv's own server, and OpenEnv's own client with a server of this project."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from unit.envs.playing import calls, play, says

from palestra.envs import SerialEnvironment, catalog_entry
from palestra.errors import EnvironmentFailed, EpisodeForfeited, TooManyRequests
from palestra_inspect.environment_check import check_environment
from palestra_worlds import OpenEnvEnvironment
from partners.environment import ROOT, clean, free_port, run, running

pytestmark = [pytest.mark.partners, pytest.mark.timeout(300)]


@pytest.fixture
def served(request):
    port = free_port()
    with running("openenv", "openenv_server.py", request.param, str(port), port=port):
        yield f"http://127.0.0.1:{port}"


async def played(environment, *actions, seed=7):
    left = iter(actions)
    serial = SerialEnvironment(environment)
    await serial.setup()
    try:
        async with asyncio.timeout(60):
            return await play(serial, {"id": "t", "seed": seed}, lambda observation: next(left))
    finally:
        await serial.close()


@pytest.mark.parametrize("served", ["guess"], indirect=True)
async def test_an_environment_whose_action_is_one_text(served):
    seen = await played(OpenEnvEnvironment(served), says("3"), says("7"))
    assert seen[0].content[0].text == "Guess a digit."
    assert [(one.content[0].text, one.reward) for one in seen[1:]] == [("wrong", 0.0), ("right", 1.0)]
    with pytest.raises(EpisodeForfeited, match="EXECUTION_ERROR"):
        await played(OpenEnvEnvironment(served), says("raise"))
    with pytest.raises(EpisodeForfeited, match=r"0\.5 s"):
        await played(OpenEnvEnvironment(served, reply_seconds=0.5), says("hang"))
    await asyncio.to_thread(check_environment, lambda: OpenEnvEnvironment(served, max_steps=3), [{"seed": 3}])


@pytest.mark.parametrize("served", ["guess"], indirect=True)
async def test_a_server_that_is_full_or_dies_is_no_reward(served):
    first, second = (OpenEnvEnvironment(served, wait_seconds=30) for _ in range(2))
    await first.setup()
    await second.setup()
    await first.reset({"seed": 1})
    await second.reset({"seed": 2})
    with pytest.raises(TooManyRequests, match="sessions of"):
        await OpenEnvEnvironment(served, wait_seconds=0.5).setup()
    await second.close()
    third = OpenEnvEnvironment(served, wait_seconds=30)
    await third.setup()
    with pytest.raises(EnvironmentFailed, match=r"OpenEnv.*reached"):  # no action is to blame
        await first.step("exit")
    with pytest.raises(EnvironmentFailed):
        await third.reset({"seed": 1})
    await first.close()
    await third.close()


@pytest.mark.parametrize("served", ["count"], indirect=True)
async def test_an_environment_whose_action_has_several_fields(served):
    environment = OpenEnvEnvironment(served)
    actions = calls(("act", {"add": 2, "why": "x"})), says('{"add": "two", "why": ""}'), says('{"add": 3, "why": ""}')
    seen = await played(environment, *actions)
    assert [tool["function"]["name"] for tool in seen[0].tools] == ["act"]
    assert "VALIDATION_ERROR" in seen[2].content[0].text
    assert [one.reward for one in seen] == [None, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("served", ["tools"], indirect=True)
async def test_an_environment_of_tools(served):
    seen = await played(OpenEnvEnvironment(served, max_steps=1), calls(("echo", {"message": "hello"})))
    assert [tool["function"]["name"] for tool in seen[0].tools] == ["echo"]
    assert "hello" in seen[1].content[0].text
    assert seen[1].truncated


def test_openenvs_client_plays_an_environment_that_is_served_here():
    key, port = "k" * 20, free_port()
    command = [sys.executable, "-m", "palestra.cli.main", "env", "serve", "calculator", "--dialect", "openenv"]
    server = subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, env={**clean(), "PALESTRA_ENVIRONMENT_KEY": key},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert "in OpenEnv's protocol" in server.stdout.readline()
        said = json.loads(run("openenv", "openenv_client.py", f"http://127.0.0.1:{port}", key).splitlines()[-1])
    finally:
        server.terminate()
        server.communicate(timeout=20)
    task = catalog_entry("calculator").generate("train", 1, 5)[0]
    assert said["first"][0].endswith(task["prompt"])
    assert said["again"] == said["first"][0]
    assert said["first"][1:] == [None, False]
    assert said["second"] == ["42", False]
    assert said["steps"] == 1
    assert said["last"] == [float(task["answer"] == "42"), True]
    assert "no episode waits for an action" in said["late"]
