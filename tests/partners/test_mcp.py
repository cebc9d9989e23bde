"""`McpServer` with a server made with MCP's official SDK."""

from __future__ import annotations

import asyncio
import json

import pytest
from unit.tools.test_manager import call

from palestra.envs import ToolEnvironment
from palestra.errors import EpisodeForfeited
from palestra.tools import ToolFailure, ToolManager
from palestra_inspect.environment_check import check_environment
from palestra_mcp import McpServer
from partners.environment import BEHIND, free_port, python_of, running

pytestmark = [pytest.mark.partners, pytest.mark.timeout(300)]


def over_stdio(**settings) -> McpServer:
    return McpServer([python_of("mcp"), str(BEHIND / "mcp_server.py")], **settings)


@pytest.fixture(params=["stdio", "http"])
def server(request):
    if request.param == "stdio":
        yield over_stdio()
        return
    port = free_port()
    with running("mcp", "mcp_server.py", str(port), port=port):
        yield McpServer(f"http://127.0.0.1:{port}/mcp")


async def answer(manager, name: str, **arguments) -> str:
    (result,) = await manager.execute_calls([call(name, json.dumps(arguments))])
    return result.content


async def test_tools_are_listed_and_called(server):
    manager = ToolManager([server])
    await manager.open()
    try:
        schemas = {schema["function"]["name"]: schema["function"] for schema in manager.schemas}
        assert set(schemas) == {"add", "move", "picture", "fail", "hang", "seen", "die", "grow"}
        assert schemas["add"]["description"] == "Add two numbers."
        assert schemas["add"]["parameters"]["required"] == ["a"]
        assert await answer(manager, "add", a=2) == "3"
        assert json.loads(await answer(manager, "move", point={"x": 1}, steps=[2, 3])) == {"x": 6, "y": 0}
        assert await answer(manager, "picture") == "[image of image/png, 8 bytes, which can't be shown]"
        assert (await answer(manager, "fail")).startswith("Error: fail failed: McpToolError: Error executing tool fail")
        assert "Error" in await answer(manager, "add", a="two")
        assert await answer(manager, "add") == "Error: bad arguments for add: the argument 'a' is missing."
    finally:
        await manager.close()


async def test_fifty_calls_at_the_same_time_each_get_their_own_result(server):
    manager = ToolManager([server])
    await manager.open()
    try:
        results = await manager.execute_calls([call("add", json.dumps({"a": n, "b": n})) for n in range(50)])
        assert [result.content for result in results] == [str(2 * n) for n in range(50)]
    finally:
        await manager.close()


async def test_a_call_that_takes_too_long_is_cancelled_at_the_server(server):
    manager = ToolManager([server], timeout_seconds=3.0)
    await manager.open()
    try:
        (result,) = await manager.execute_calls([call("hang")])
        assert result.failure is ToolFailure.TIMED_OUT
        async with asyncio.timeout(10):
            while "hang" not in await answer(manager, "seen"):
                await asyncio.sleep(0.05)
    finally:
        await manager.close()


async def test_a_list_that_changes_is_read_anew(server):
    manager = ToolManager([server])
    await manager.open()
    try:
        assert await answer(manager, "grow") == "grown"
        async with asyncio.timeout(10):
            while "new" not in {schema["function"]["name"] for schema in manager.schemas}:
                await manager.refresh()
                await asyncio.sleep(0.05)
        assert await answer(manager, "new") == "new"
    finally:
        await manager.close()


async def test_a_server_that_dies_fails_the_attempt_and_a_shared_one_is_started_anew():
    manager = ToolManager([over_stdio()])
    await manager.open()
    with pytest.raises(EpisodeForfeited, match=r"code.*3"):
        await answer(manager, "die")
    await manager.close()
    shared = ToolManager([over_stdio(shared=True)])
    await shared.open()
    with pytest.raises(EpisodeForfeited, match=r"code.*3"):
        await answer(shared, "die")
    assert await answer(shared, "add", a=1) == "2"
    await shared.close()


def test_an_environment_with_its_tools_keeps_to_what_environments_have_to_do():
    port = free_port()

    def environment() -> ToolEnvironment:
        tools = [McpServer(f"http://127.0.0.1:{port}/mcp", tools=["add", "fail"])]
        return ToolEnvironment(tools, lambda task, answer: float(answer == "5"), max_steps=2)

    with running("mcp", "mcp_server.py", str(port), port=port):
        check_environment(environment, [{"prompt": "2 + 3?"}])
