"""The application of an environment server: a session for each WebSocket, and a page that shows them."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from palestra.env_server.page import PAGE, PAGE_HEADERS, carry
from palestra.env_server.sessions import SessionTable
from palestra.errors import PalestraError, Unauthorized
from palestra.http.app import PUBLIC, build_app
from palestra.http.errors import Failure, openai_error
from palestra.http.guard import bearer
from palestra.http.server import served
from palestra.types.env_wire import EnvironmentFacts, SessionList

TITLE = "Palestra environment server"


def create_env_app(table: SessionTable, key: str) -> FastAPI:
    """Return the application that serves an environment."""

    def check_key(request: Request) -> None:
        if not hmac.compare_digest((bearer(request) or "").encode(), key.encode()):
            raise Unauthorized("no key, or one that is not this server's")

    async def authenticate(request: Request) -> int:
        check_key(request)
        return table.limits.max_message_bytes

    app = build_app(
        TITLE, "Plays environments; see docs/reference/environment-protocol.md.", authenticate,
        table.limits.max_message_bytes, {*PUBLIC, "/"},
    )  # fmt: skip

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Return the page of sessions, which asks for the key."""
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    @app.get("/v1/environment")
    async def environment() -> EnvironmentFacts:
        """Return the facts about the environment that are known before an episode."""
        return table.facts

    @app.get("/v1/sessions")
    async def sessions() -> SessionList:
        """List the sessions."""
        return table.list()

    @app.websocket("/v1/session")
    async def play(websocket: WebSocket) -> None:
        """Play episodes until the client disconnects."""
        try:
            check_key(Request({**websocket.scope, "type": "http"}))
            table.check_open()
        except PalestraError as error:
            failure = Failure.of(error)
            with contextlib.suppress(WebSocketDisconnect):
                await websocket.send_denial_response(JSONResponse(openai_error(failure), failure.status))
            return
        with contextlib.suppress(WebSocketDisconnect):  # the client is gone already
            await websocket.accept()
            await carry(table, websocket)

    return app


@asynccontextmanager
async def served_environment(table: SessionTable, key: str, listener: socket.socket) -> AsyncIterator[None]:
    """Serve an environment inside the block; its end ends all sessions. `listener`: a listening socket, closed at the
    end.
    """
    app, most = create_env_app(table, key), table.limits.max_message_bytes
    try:
        async with served(app, listener, table.stop, websocket_bytes=most):
            yield
    finally:
        await table.close()
