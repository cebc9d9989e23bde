"""What a server may ask of its clients, and what a server of a stranger can't."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from palestra.env_server import SessionLimits
from palestra.envs.remote import RemoteEnvironment
from palestra.errors import ConfigError, ConnectionLost, EnvironmentFailed, PalestraError
from palestra.http.server import listen, served, url_of
from palestra.types.env_wire import MOST_WAITING

CREATED = {
    "session_id": "s",
    "key": "k",
    "protocol": 1,
    "lease_seconds": 60.0,
    "max_message_bytes": 1024,
    "environment": {"name": "E", "protocols": [1]},
}


@pytest.mark.parametrize(
    "asked",
    [{"lease_seconds": 1e-9}, {"lease_seconds": -1.0}, {"max_message_bytes": 10**12}, {"max_message_bytes": 0}],
)
async def test_a_client_has_no_session_that_would_fill_its_memory_or_its_time(asked):
    async def create(request: Request) -> Response:
        answer = {"status": "created", "session": {**CREATED, **asked}}
        return Response(json.dumps(answer), media_type="application/json")

    app, listener = FastAPI(), listen("127.0.0.1", 0)
    app.add_route("/v1/sessions", create, methods=["POST"])
    async with served(app, listener):
        environment = RemoteEnvironment(url_of(listener), "k", retry_seconds=0.0)
        with pytest.raises(PalestraError, match="no answer of Palestra"):
            await environment.setup()
        assert environment._link is None
    with pytest.raises(ConfigError, match="lease_seconds is at least"):  # a server of this package offers none
        SessionLimits(**asked)


async def test_a_client_reads_no_answer_without_an_end():
    async def endless(request: Request) -> Response:
        return StreamingResponse((b" " * 2**20 for _ in range(30)), media_type="application/json")

    app, listener = FastAPI(), listen("127.0.0.1", 0)
    app.add_route("/v1/sessions", endless, methods=["POST"])
    app.add_route("/v1/environment", endless, methods=["GET"])
    async with served(app, listener):
        environment = RemoteEnvironment(url_of(listener), "k", retry_seconds=0.0)
        with pytest.raises(ConnectionLost, match="more than"):
            await environment.setup()
        with pytest.raises(ConnectionLost, match="more than"):
            await asyncio.to_thread(lambda: environment.facts)


def shown(first: int, last: int) -> str:
    messages = [{"number": n, "type": "observation", "id": f"o{n}", "agent": "a"} for n in range(first, last)]
    return json.dumps({"ack": 1, "messages": messages})


@pytest.mark.slow
async def test_a_server_that_shows_without_an_end_fails_the_episode():
    app, listener = FastAPI(), listen("127.0.0.1", 0)
    gone = asyncio.Event()

    @app.post("/v1/sessions")
    async def create() -> Response:
        return Response(json.dumps({"status": "created", "session": CREATED}), media_type="application/json")

    @app.websocket("/v1/sessions/s/stream")
    async def stream(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text('{"ack": 0, "messages": []}')
        while not json.loads(await websocket.receive_text())["messages"]:
            pass
        await websocket.send_text('{"ack": 1, "messages": [{"number": 1, "type": "done", "of": 1}]}')
        with contextlib.suppress(WebSocketDisconnect):
            for first in range(2, 20_000, 50):
                await websocket.send_text(shown(first, first + 50))
            while True:
                await websocket.receive_text()
        gone.set()

    async with served(app, listener, websocket_bytes=2**20):
        environment = RemoteEnvironment(url_of(listener), "k", retry_seconds=0.0)
        await environment.reset({})
        await asyncio.wait_for(gone.wait(), 10)  # the client has closed the connection
        assert environment._unseen.qsize() <= MOST_WAITING
        assert environment._link._events.qsize() <= MOST_WAITING + 1
        seen = environment._unseen.qsize()
        for _ in range(seen):
            await environment.observe()
        with pytest.raises(EnvironmentFailed, match="more than 4,096 observations at a time"):
            await environment.observe()
        await asyncio.wait_for(environment._link._running, 5)  # the connection is closed
        await environment.close()
