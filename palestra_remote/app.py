"""The application of an environment server: a session for each WebSocket, and a page that shows them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from palestra.errors import InvalidRequest, PalestraError, ProtocolMismatch, TooManyRequests, Unauthorized
from palestra.http.app import PUBLIC, build_app
from palestra.http.bodies import parse_body
from palestra.http.errors import Failure, openai_error
from palestra.http.guard import bearer
from palestra.http.server import served
from palestra.waiting import race
from palestra_remote.session import Send, error_line
from palestra_remote.sessions import SessionTable
from palestra_remote.wire import (
    CLOSE_ENDED,
    CLOSE_REFUSED,
    MOST_WAITING,
    PROTOCOL,
    ClientMessage,
    EnvironmentFacts,
    Open,
    Opened,
    SessionFailed,
    SessionList,
)

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
            await play_session(table, websocket)

    return app


@asynccontextmanager
async def served_environment(table: SessionTable, key: str, listener: socket.socket) -> AsyncIterator[None]:
    """Serve an environment inside the block, whose end ends all sessions and closes the listener."""
    app, most = create_env_app(table, key), table.limits.max_message_bytes
    try:
        async with served(app, listener, table.stop, websocket_bytes=most):
            yield
    finally:
        await table.close()


_SCRIPT = """
const form = document.querySelector("form"), body = document.querySelector("tbody"), told = document.querySelector("p");
const columns = ["session_id", "state", "age_seconds", "silent_seconds", "episodes", "observations", "actions",
                 "open"];
let key = "";
async function show() {
  if (!key) return;
  try {
    const answer = await fetch("v1/sessions", {headers: {authorization: "Bearer " + key}});
    const found = await answer.json();
    if (!answer.ok) { told.textContent = found.error.message; key = ""; form.hidden = false; return; }
    form.hidden = true;
    told.textContent = `${found.environment}: ${found.sessions.length} of ${found.limit} sessions, ` +
      `${found.waiting} waiting, ${found.opened} since the start` +
      (found.draining ? "; draining: no new sessions" : "");
    body.replaceChildren(...found.sessions.map(session => {
      const row = document.createElement("tr");
      row.append(...columns.map(name => {
        const cell = document.createElement("td");
        cell.textContent = session[name];
        return cell;
      }));
      return row;
    }));
  } catch (error) { told.textContent = "the server does not answer"; }
}
form.addEventListener("submit", event => { event.preventDefault(); key = form.elements.key.value.trim(); show(); });
setInterval(show, 2000);
"""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .75rem .25rem 0; }
td { font-variant-numeric: tabular-nums; border-top: 1px solid #8884; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
"""
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Environment server</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body><h1>Environment server</h1>
<form><label>Key of this server <input name="key" type="password" autocomplete="off" required></label>
<button>Show the sessions</button></form>
<p role="status"></p>
<table><thead><tr><th scope="col">session<th scope="col">state<th scope="col">age (s)<th scope="col">silent (s)
<th scope="col">episodes<th scope="col">observations<th scope="col">actions<th scope="col">open</tr></thead>
<tbody></tbody></table>
<script>{_SCRIPT}</script></body></html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE_HEADERS = {
    "content-security-policy": f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


MAX_REASON_BYTES = 120  # of the WebSocket's close frame


async def play_session(table: SessionTable, websocket: WebSocket) -> None:
    """Play for a client until it disconnects, or the session ends."""
    inbox: asyncio.Queue[ClientMessage] = asyncio.Queue()

    async def send(text: str) -> None:
        with contextlib.suppress(WebSocketDisconnect):  # the reader sees it, and ends the session
            await websocket.send_text(text)

    code, reason = CLOSE_ENDED, "the session has ended"
    try:
        # Someone has to read all the time: nothing else notices that the client is gone.
        await race(_read(websocket, inbox), _play(table, send, inbox))
    except WebSocketDisconnect:
        return
    except PalestraError as error:
        code, reason = CLOSE_REFUSED, str(error)
    if websocket.application_state is WebSocketState.CONNECTED:
        await websocket.close(code, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))


async def _read(websocket: WebSocket, inbox: asyncio.Queue[ClientMessage]) -> None:
    """Put the client's messages into the inbox until it disconnects, or one is refused."""
    while True:
        event = await websocket.receive()
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event["code"])
        text: str | None = event.get("text")
        message = parse_body(ClientMessage, event["bytes"] if text is None else text.encode())
        if inbox.qsize() >= MOST_WAITING:
            raise TooManyRequests(f"{MOST_WAITING:,} messages wait until they are handled")
        inbox.put_nowait(message)


async def _play(table: SessionTable, send: Send, inbox: asyncio.Queue[ClientMessage]) -> None:
    try:
        opening = await _opening(inbox, table.limits.idle_seconds)
        async with table.session(opening.system, opening.wait_seconds, send) as session:
            opened = Opened(max_message_bytes=table.limits.max_message_bytes, environment=table.facts)
            await send(opened.model_dump_json())
            await session.play(inbox)
    except PalestraError as error:
        await send(SessionFailed(code=error.code, message=error_line(error)).model_dump_json())


async def _opening(inbox: asyncio.Queue[ClientMessage], seconds: float) -> Open:
    """Return the client's first message."""
    try:
        async with asyncio.timeout(seconds):
            opening = (await inbox.get()).root
    except TimeoutError:
        raise InvalidRequest(f"no message came for {seconds:g} s") from None
    if not isinstance(opening, Open):
        raise InvalidRequest(f"a session begins with `open`, and not with {opening.type!r}")
    if opening.protocol != PROTOCOL:
        raise ProtocolMismatch(
            f"this server speaks version {PROTOCOL} of the environment protocol, and the client {opening.protocol}",
            "protocol",
        )
    return opening
