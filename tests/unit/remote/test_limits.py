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

from palestra.errors import ConfigError, ConnectionLost, EnvironmentFailed
from palestra.http.server import listen, served, url_of
from palestra_remote import RemoteEnvironment, SessionLimits
from palestra_remote.wire import MOST_WAITING, PROTOCOL

OPENED = {"type": "opened", "max_message_bytes": 1024, "environment": {"name": "E", "protocol": PROTOCOL}}


def answering(*messages: str, gone: asyncio.Event | None = None) -> FastAPI:
    """Return a server that sends these after the first message, and then waits for the client's end."""
    app = FastAPI()

    @app.websocket("/v1/session")
    async def play(websocket: WebSocket) -> None:
        await websocket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            await websocket.receive_text()
            for message in messages:
                await websocket.send_text(message)
            while True:
                await websocket.receive_text()
        if gone is not None:
            gone.set()

    return app


@pytest.mark.parametrize("most", [10**12, 0])
async def test_a_client_has_no_session_that_would_fill_its_memory(most):
    listener = listen("127.0.0.1", 0)
    async with served(answering(json.dumps(OPENED | {"max_message_bytes": most})), listener, websocket_bytes=2**20):
        environment = RemoteEnvironment(url_of(listener), "k", retry_seconds=0.0)
        with pytest.raises(EnvironmentFailed, match=r"keep.*protocol"):
            await environment.setup()
        assert environment._link is None
    with pytest.raises(ConfigError, match=r"max_message_bytes.*least"):  # a server of this package offers none
        SessionLimits(max_message_bytes=most)


async def test_a_client_reads_no_answer_without_an_end():
    async def endless(request: Request) -> Response:
        return StreamingResponse((b" " * 2**20 for _ in range(30)), media_type="application/json")

    app, listener = FastAPI(), listen("127.0.0.1", 0)
    app.add_route("/v1/environment", endless, methods=["GET"])
    async with served(app, listener):
        environment = RemoteEnvironment(url_of(listener), "k", retry_seconds=0.0)
        with pytest.raises(ConnectionLost, match="more than"):
            await asyncio.to_thread(lambda: environment.facts)


@pytest.mark.slow
async def test_a_server_that_shows_without_an_end_fails_the_episode():
    shown = [json.dumps({"type": "observation", "episode": 1, "id": f"o{n}", "agent": "a"}) for n in range(20_000)]
    begun, listener, gone = json.dumps({"type": "begun", "episode": 1}), listen("127.0.0.1", 0), asyncio.Event()
    async with served(answering(json.dumps(OPENED), begun, *shown, gone=gone), listener, websocket_bytes=2**20):
        environment = RemoteEnvironment(url_of(listener), "k", retry_seconds=0.0)
        await environment.reset({})
        while environment._failure is None:
            await asyncio.sleep(0.01)
        assert len(environment._unseen) <= MOST_WAITING
        for _ in range(len(environment._unseen)):
            await environment.observe()
        with pytest.raises(EnvironmentFailed, match="4,096"):
            await environment.observe()
        await environment.close()
        await asyncio.wait_for(gone.wait(), 10)  # the client has closed the connection
