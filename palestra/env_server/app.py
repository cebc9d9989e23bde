"""The application of an environment server: sessions over WebSocket and plain HTTP, and a page that shows them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket

from palestra.env_server.page import PAGE, PAGE_HEADERS
from palestra.env_server.sessions import SessionTable
from palestra.env_server.sockets import carry
from palestra.errors import InvalidRequest, PalestraError, Unauthorized
from palestra.http.app import PUBLIC, build_app, request_schema
from palestra.http.bodies import parse_body
from palestra.http.errors import Failure, openai_error
from palestra.http.guard import bearer
from palestra.http.server import served
from palestra.types.env_wire import (
    MAX_WAIT_SECONDS,
    ClientFrame,
    CreateSession,
    EnvironmentFacts,
    ServerFrame,
    SessionAnswer,
    SessionList,
)
from palestra.waiting import cancelled

SESSION = "/v1/sessions/"  # the beginning of the paths that a session's own key opens
TITLE = "Palestra environment server"


def create_env_app(table: SessionTable, key: str) -> FastAPI:
    """Return the application that serves an environment.

    Args:
        key: makes sessions and lists them; each session has a key of its own.
    """

    async def authenticate(request: Request) -> int:
        path = request.url.path
        if path.startswith(SESSION):
            table.session(path.removeprefix(SESSION).partition("/")[0], bearer(request) or "")
        elif not hmac.compare_digest((bearer(request) or "").encode(), key.encode()):
            raise Unauthorized("no key, or one that is not this server's")
        return table.limits.max_frame_bytes

    app = build_app(
        TITLE, "Plays environments; see docs/environment-protocol.md.", authenticate, table.limits.max_frame_bytes,
        {*PUBLIC, "/"},
    )  # fmt: skip

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Return the page with the sessions, which asks for the key."""
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    @app.get("/v1/environment")
    async def environment() -> EnvironmentFacts:
        """Return what is known of the environment before an episode."""
        return table.facts

    @app.get("/v1/sessions")
    async def sessions() -> SessionList:
        """List the sessions."""
        return table.list()

    @app.post("/v1/sessions", openapi_extra=request_schema(CreateSession))
    async def create(request: Request) -> SessionAnswer:
        """Make a session, or say that all are in use."""
        return await table.create(parse_body(CreateSession, await request.body()))

    @app.post("/v1/sessions/{session_id}/exchange", openapi_extra=request_schema(ClientFrame),
              response_model=ServerFrame)  # fmt: skip
    async def exchange(session_id: str, request: Request) -> Response:
        """Take messages of the client, and answer with those that it does not have: the protocol without WebSocket."""
        session = table.session(session_id, bearer(request) or "")
        frame = parse_body(ClientFrame, await request.body())
        session.receive(frame)
        # Less than the lease, which no frame renews meanwhile.
        most = min(frame.wait_seconds, MAX_WAIT_SECONDS, table.limits.lease_seconds / 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most):
                await session.something_to_send()
        return Response(session.stream.frame(0)[0], media_type="application/json")

    @app.websocket("/v1/sessions/{session_id}/stream")
    async def stream(websocket: WebSocket, session_id: str) -> None:
        """Carry a session's messages until the connection or the session ends."""
        try:
            session = table.session(session_id, bearer(Request({**websocket.scope, "type": "http"})) or "")
            session.stream.resume(_received(websocket))
        except PalestraError as error:
            failure = Failure.of(error)
            await websocket.send_denial_response(JSONResponse(openai_error(failure), failure.status))
            return
        await carry(session, websocket)

    return app


@asynccontextmanager
async def served_environment(table: SessionTable, key: str, listener: socket.socket) -> AsyncIterator[None]:
    """Serve an environment inside of the block, and end all sessions with it.

    Args:
        listener: a socket that listens; it is closed at the end.
    """
    sweeping = asyncio.create_task(table.sweep())
    try:
        async with served(create_env_app(table, key), listener, websocket_bytes=table.limits.max_frame_bytes):
            yield
    finally:
        try:
            await cancelled(sweeping)
        finally:
            await table.close()


def _received(websocket: WebSocket) -> int:
    """Return the number of the last message that the client has, of the query."""
    text = websocket.query_params.get("received", "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidRequest("`received` is the number of a message", "received")
    return int(text)
