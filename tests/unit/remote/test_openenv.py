"""An environment served in OpenEnv's protocol: episodes over its WebSocket, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from palestra.envs import CalculatorEnvironment, Environment, SerialEnvironment, catalog_entry
from palestra.http.server import listen, served, url_of
from palestra_remote.openenv import OpenEnvServer, seeded_tasks
from palestra_remote.session import SessionLimits
from palestra_worlds import KuhnPoker, OpenEnvEnvironment, SplitSum
from unit.envs.playing import calls, play, says

KEY = "k" * 20


class Guess(Environment):
    """Guess a number."""

    closed = 0

    def reset(self, task):
        self.secret = task["secret"]
        return "guess", {}

    def step(self, action):
        if action == "raise":
            raise KeyError(action)
        if action == "nothing":
            return "not scored", None, True, False, {}
        return "no", float(int(action) == self.secret), int(action) == self.secret, False, {}

    def close(self):
        type(self).closed += 1


class Hangs(Environment):
    async def reset(self, task):
        await asyncio.sleep(30)

    def step(self, action):
        raise NotImplementedError


@contextlib.asynccontextmanager
async def serving(make=Guess, tasks=None, **limits) -> AsyncIterator[tuple[OpenEnvServer, str]]:
    server, listener = OpenEnvServer(make, SessionLimits(**limits), tasks=tasks), listen("127.0.0.1", 0)
    try:
        async with served(server.app(KEY), listener, websocket_bytes=server.limits.max_message_bytes):
            yield server, url_of(listener)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def talking(url: str):
    headers = {"authorization": f"Bearer {KEY}"}
    async with connect(f"ws{url[4:]}/ws", additional_headers=headers, proxy=None) as socket:

        async def ask(kind, data=None):
            with contextlib.suppress(ConnectionClosed):  # the server may have hung up, and said why before
                await socket.send(kind if data is None else json.dumps({"type": kind, "data": data}))
            answer = json.loads(await socket.recv())
            return answer["data"].get("code") or answer["data"]

        yield ask


async def test_episodes_over_one_connection():
    async with serving() as (server, url), talking(url) as ask:
        first = await ask("reset", {"secret": 3, "seed": None, "episode_id": "e"})
        assert (first["observation"]["text"], first["reward"], first["done"]) == ("guess", None, False)
        again = await ask("step", {"message": "2"})
        assert (again["observation"]["text"], again["reward"], again["done"]) == ("no", 0.0, False)
        assert await ask('{"type": "state"}') == {"episode_id": "e", "step_count": 1}
        assert (await ask("step", {"message": "3"}))["reward"] == 1.0
        assert await ask("step", {"message": "3"}) == "EXECUTION_ERROR"
        assert (await ask("reset", {"secret": 4}))["done"] is False
        assert len(server) == 1


async def test_a_failure_is_an_error_and_never_a_reward_and_the_next_episode_has_a_new_environment():
    async with serving() as (_, url), talking(url) as ask:
        Guess.closed = 0
        await ask("reset", {"secret": 3})
        assert await ask("step", {"message": "raise"}) == "EXECUTION_ERROR"
        assert Guess.closed == 1
        assert await ask("step", {"message": "3"}) == "EXECUTION_ERROR"
        await ask("reset", {"secret": 3})
        assert await ask("step", {"message": "nothing"}) == "EXECUTION_ERROR"
        await ask("reset", {"secret": 3})
        assert (await ask("step", {"message": "3"}))["reward"] == 1.0
    async with serving(Hangs, hang_seconds=0.2) as (_, url), talking(url) as ask:
        assert await ask("reset", {}) == "EXECUTION_ERROR"
    async with serving(KuhnPoker) as (_, url), talking(url) as ask:
        await ask("reset", {"seed": 1})
        assert await ask("step", {"message": "p"}) == "EXECUTION_ERROR"  # it is the other player's move
    async with serving(SplitSum) as (_, url), talking(url) as ask:
        task = catalog_entry("subagents").generate("train", 1, 1)[0]
        await ask("reset", task)
        assert "delegate" in [one["function"]["name"] for one in (await ask("reset", task))["observation"]["tools"]]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[1]", "UNKNOWN_TYPE"),
        ('{"type": "mcp", "data": {}}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": 3}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"guess": "3"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "3"}}', "EXECUTION_ERROR"),
        ('{"type": "reset", "data": {}}', "EXECUTION_ERROR"),
    ],
)
async def test_wrong_messages_are_answered_with_openenvs_codes(message, code):
    async with serving() as (_, url), talking(url) as ask:
        assert await ask(message) == code
        assert (await ask("reset", {"secret": 1}))["done"] is False


async def test_a_message_of_bytes_is_refused_and_no_error_of_the_server(caplog):
    async with serving() as (_, url), talking(url) as ask:
        assert await ask(b"\x00abc") == "INVALID_JSON"
        assert (await ask("reset", {"secret": 3}))["done"] is False
    assert not [one for one in caplog.records if one.exc_info]


async def test_sessions_are_limited_and_end_with_their_connections():
    async with serving(sessions=1) as (server, url):
        async with talking(url) as ask, talking(url) as other:
            await ask("reset", {"secret": 1})
            assert await other("reset", {"secret": 1}) == "CAPACITY_REACHED"
        async with asyncio.timeout(5):
            while len(server):
                await asyncio.sleep(0.01)
        async with talking(url) as ask:
            assert (await ask("reset", {"secret": 1}))["done"] is False


async def test_a_key_is_needed_for_all_but_the_sign_of_life():
    async with serving() as (_, url), httpx2.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).json() == {"status": "healthy"}
        assert (await http.get("/schema")).status_code == 401
        http.headers["authorization"] = f"Bearer {KEY}"
        assert (await http.get("/schema")).json()["action"]["required"] == ["message"]
        assert (await http.get("/metadata")).json() == {"name": "Guess", "description": "Guess a number."}
        assert (await http.post("/step", json={"action": {}})).status_code == 409
        async with connect(f"ws{url[4:]}/ws", proxy=None) as socket:
            await socket.wait_closed()
            assert socket.close_code == 1008


async def test_this_projects_own_client_plays_what_is_served():
    tasks = seeded_tasks(catalog_entry("calculator").generate)
    async with serving(CalculatorEnvironment, tasks) as (_, url):
        environment = SerialEnvironment(OpenEnvEnvironment(url, KEY, action_field="message"))
        await environment.setup()
        task = catalog_entry("calculator").generate("train", 1, 5)[0]
        seen = await play(environment, {"id": "t", "seed": 5}, lambda seen: says(task["answer"]))
        assert task["prompt"] in seen[0].content[0].text
        assert seen[-1].reward == 1.0
        await environment.close()


async def test_calls_of_tools_are_run():
    async with serving(CalculatorEnvironment) as (_, url), talking(url) as ask:
        shown = await ask("reset", {"prompt": "2 * 3?", "answer": "6"})
        names = [tool["function"]["name"] for tool in shown["observation"]["tools"]]
        assert names == ["calculator", "finish"]
        asked = calls(("calculator", {"expression": "2 * 3"})).tool_calls[0].function
        call = {"name": asked.name, "arguments": json.loads(asked.arguments)}
        shown = await ask("step", {"message": "", "tool_calls": [call]})
        assert [message["role"] for message in shown["observation"]["messages"]] == ["tool"]
        assert shown["observation"]["text"] == "6"
