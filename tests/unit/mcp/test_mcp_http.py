"""Servers of MCP over streamable HTTP: streams and plain answers, sessions, announcements, and all that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from palestra.errors import EnvironmentFailed
from palestra.http.server import listen, served, url_of
from palestra.tools import ToolFailure, ToolManager
from palestra_mcp import McpServer
from unit.tools.test_manager import call

ADD = {"name": "add", "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


class Server:
    """A server whose session the test can take away; `fault` says what it does wrong."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.session, self.tools = fault, "s1", [ADD]
        self.heard: list[str] = []
        self.deleted: list[str | None] = []
        self.announce = asyncio.Event()

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_route("/mcp", self.post, methods=["POST"])
        app.add_route("/mcp", self.get, methods=["GET"])
        app.add_route("/mcp", self.delete, methods=["DELETE"])
        app.add_route("/old", lambda request: RedirectResponse("/mcp", 307), methods=["POST"])
        app.add_route("/page", lambda request: Response("<html>", media_type="text/html"), methods=["POST"])
        return app

    async def get(self, request: Request) -> Response:
        async def announcements():
            await self.announce.wait()
            if self.fault == "garbled":
                yield "data: no JSON\n\n"
            if self.fault == "asks":
                for number in range(1000):
                    yield f'data: {{"jsonrpc": "2.0", "id": {number}, "method": "ping"}}\n\n'
            yield 'data: {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n\n'
            await asyncio.sleep(30)

        return StreamingResponse(announcements(), media_type="text/event-stream")

    async def delete(self, request: Request) -> Response:
        self.deleted.append(request.headers.get("mcp-session-id"))
        return Response(status_code=204)

    async def post(self, request: Request) -> Response:
        message = json.loads(await request.body())
        method = message.get("method", "")
        self.heard.append(method)
        if self.fault == "asks" and not method:
            await asyncio.sleep(30)
        if self.fault == "key" and request.headers.get("authorization") != "Bearer k":
            return Response("who are you?", 401)
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {"listChanged": True}}}
            return self.plain(message, result, {"mcp-session-id": self.session})
        assert request.headers["mcp-protocol-version"] == "2025-11-25"
        if request.headers.get("mcp-session-id") != self.session:
            return Response(status_code=404)
        if "id" not in message:
            return Response(status_code=202)
        if method == "tools/list":
            return self.plain(message, {"tools": self.tools})
        return self.called(message)

    def called(self, message: dict) -> Response:
        if self.fault == "broken":
            return Response("out of order", 500)
        if self.fault == "cut":
            return StreamingResponse(iter(["id: 1\ndata:\n\n"]), media_type="text/event-stream")
        text = "x" * 50_000 if self.fault == "large" else str(message["params"]["arguments"]["a"] + 1)
        result = {"content": [{"type": "text", "text": text}]}

        async def events():
            yield "id: 1\nretry: 1000\ndata:\n\n"
            yield 'data: {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}\n\n'
            if self.fault == "hangs":
                await asyncio.sleep(30)
            yield f"event: message\ndata: {json.dumps({'jsonrpc': '2.0', 'id': message['id'], 'result': result})}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @staticmethod
    def plain(message: dict, result: dict, headers: dict | None = None) -> Response:
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        return Response(body, media_type="application/json", headers=headers)


@contextlib.asynccontextmanager
async def serving(fault: str = "", path: str = "/mcp", seconds: float = 20.0, **settings):
    server = Server(fault)
    listener = listen("127.0.0.1", 0)
    async with served(server.app(), listener):
        manager = ToolManager([McpServer(url_of(listener) + path, **settings)], timeout_seconds=seconds)
        try:
            yield server, manager
        finally:
            await manager.close()


async def test_a_session_of_calls_in_streams_and_its_end():
    async with serving() as (server, manager):
        await manager.open()
        results = await manager.execute_calls([call("add", json.dumps({"a": n})) for n in range(20)])
        assert [result.content for result in results] == [str(n + 1) for n in range(20)]
        await manager.close()
        assert server.heard[:3] == ["initialize", "notifications/initialized", "tools/list"]
        assert server.deleted == ["s1"]


async def test_a_list_that_changes_is_announced_and_read_anew():
    async with serving() as (server, manager):
        await manager.open()
        await manager.refresh()
        assert server.heard.count("tools/list") == 1
        server.tools = [ADD, {**ADD, "name": "subtract"}]
        server.announce.set()
        async with asyncio.timeout(5):
            while len(manager.schemas) < 2:
                await asyncio.sleep(0.01)
                await manager.refresh()
        assert server.heard.count("tools/list") == 2


async def test_a_server_that_asks_and_takes_no_answers_is_given_up():
    async with serving("asks") as (server, manager):
        await manager.open()
        server.announce.set()

        async def calls() -> None:
            while True:
                await manager.execute_calls([call("add", '{"a": 1}')])

        with pytest.raises(EnvironmentFailed, match=r"takes.*answers"):
            await asyncio.wait_for(calls(), 5)
        assert len(asyncio.all_tasks()) < 400


async def test_announcements_that_can_not_be_read_are_a_warning_and_calls_go_on(caplog):
    async with serving("garbled") as (server, manager):
        await manager.open()
        server.announce.set()
        async with asyncio.timeout(5):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        assert "what is no message of MCP: 'no JSON'; what it announces is not heard" in caplog.text
        (result,) = await manager.execute_calls([call("add", '{"a": 1}')])
        assert result.content == "2"


async def test_a_call_that_hangs_is_cancelled_and_leaves_the_session_usable():
    async with serving("hangs", seconds=0.5) as (server, manager):
        await manager.open()
        (result,) = await manager.execute_calls([call("add", '{"a": 1}')])
        assert result.failure is ToolFailure.TIMED_OUT
        async with asyncio.timeout(5):
            while "notifications/cancelled" not in server.heard:
                await asyncio.sleep(0.01)
        server.fault = ""
        assert [r.content for r in await manager.execute_calls([call("add", '{"a": 1}')])] == ["2"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("broken", r"500.*order"),
        ("cut", r"ended.*result"),
        ("large", r"10000.*byte"),
    ],
)
async def test_a_call_that_the_server_loses_fails_the_attempt(fault, words):
    async with serving(fault, max_message_bytes=10_000) as (_, manager):
        await manager.open()
        with pytest.raises(EnvironmentFailed, match=words):
            await manager.execute_calls([call("add", '{"a": 1}')])


@pytest.mark.parametrize(("shared", "content"), [(False, None), (True, "2")])
async def test_a_session_that_the_server_forgets_fails_the_attempt_and_a_shared_one_begins_anew(shared, content):
    async with serving(shared=shared) as (server, manager):
        await manager.open()
        server.session = "s2"
        with pytest.raises(EnvironmentFailed, match=r"forgotten.*session"):
            await manager.execute_calls([call("add", '{"a": 1}')])
        if content is None:
            with pytest.raises(EnvironmentFailed, match=r"forgotten.*session"):
                await manager.execute_calls([call("add", '{"a": 1}')])
        else:
            assert [r.content for r in await manager.execute_calls([call("add", '{"a": 1}')])] == [content]


@pytest.mark.parametrize(
    ("path", "fault", "words"),
    [
        ("/", "", "answers 404: it has no MCP server at this path, which is /mcp at most servers"),
        ("/old", "", "answers 307: it redirects to /mcp; give that URL"),
        ("/page", "", "answers with text/html, which is not MCP"),
        ("/mcp", "key", "answers 401: it wants a key"),
    ],
)
async def test_what_is_no_server_of_mcp_says_so_in_a_line(path, fault, words):
    async with serving(fault, path) as (_, manager):
        with pytest.raises(EnvironmentFailed) as refused:
            await manager.open()
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)


async def test_a_key_is_a_header():
    async with serving("key", headers={"authorization": "Bearer k"}) as (_, manager):
        await manager.open()
        assert [r.content for r in await manager.execute_calls([call("add", '{"a": 1}')])] == ["2"]


async def test_a_server_that_is_not_running_is_named_with_its_url():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(EnvironmentFailed, match=rf"MCP.*http://127.0.0.1:{port}/mcp.*reached"):
        await ToolManager([McpServer(f"http://127.0.0.1:{port}/mcp")]).open()
