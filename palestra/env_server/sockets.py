"""A session over its WebSocket: both begin and end together."""

from __future__ import annotations

import asyncio
import contextlib

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
