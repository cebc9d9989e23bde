"""The page of an environment server: its sessions, read with the server's key. It loads no external resources."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from palestra.env_server.session import Send, error_line
from palestra.env_server.sessions import SessionTable
from palestra.errors import InvalidRequest, PalestraError, ProtocolMismatch, TooManyRequests
from palestra.http.bodies import parse_body
from palestra.types.env_wire import (
    CLOSE_ENDED,
    CLOSE_REFUSED,
    MOST_WAITING,
    PROTOCOL,
    ClientMessage,
    Open,
    Opened,
    SessionFailed,
)
from palestra.waiting import race

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


async def carry(table: SessionTable, websocket: WebSocket) -> None:
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
    """Open a session for the client and play its episodes."""
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
