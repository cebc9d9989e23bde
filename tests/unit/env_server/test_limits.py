"""What a server may ask of its clients, and what a server of a stranger can't."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from palestra.env_server import SessionLimits
from palestra.envs.remote import RemoteEnvironment
from palestra.errors import ConfigError, ConnectionLost, PalestraError
from palestra.http.server import listen, served, url_of

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
