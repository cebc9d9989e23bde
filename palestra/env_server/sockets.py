"""A session over a WebSocket: frames in both directions until the connection or the session ends."""

from __future__ import annotations

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from palestra.env_server.session import EnvironmentSession
from palestra.errors import PalestraError
from palestra.http.bodies import parse_body
from palestra.types.env_wire import CLOSE_ENDED, CLOSE_REFUSED, CLOSE_REPLACED, ClientFrame
from palestra.waiting import race

ACKNOWLEDGED_AFTER = 32  # messages of the client, where there is nothing to send that would carry the acknowledgement
MAX_REASON_BYTES = 120  # of the WebSocket's close frame


async def carry(session: EnvironmentSession, websocket: WebSocket) -> None:
    """Carry a session's messages over a new connection, which takes the place of an older one."""
    await websocket.accept()
    connection = _Connection(session, websocket)
    session.connection = connection
    session.news.set()  # an older connection notices that it was replaced
    try:
        await race(connection.read(), connection.write())
    except WebSocketDisconnect:
        return
    finally:
        if session.connection is connection:
            session.connection = None


class _Connection:
    def __init__(self, session: EnvironmentSession, websocket: WebSocket) -> None:
        self._session, self._websocket = session, websocket
        self._acknowledged = -1  # number of the last message of the client of which this connection has told it

    async def read(self) -> None:
        """Handle frames of the client until the connection ends, or a frame is refused."""
        session, websocket = self._session, self._websocket
        while True:
            event = await websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            text: str | None = event.get("text")
            try:
                session.receive(parse_body(ClientFrame, event["bytes"] if text is None else text.encode()))
            except PalestraError as error:
                await self._close(CLOSE_REFUSED, str(error))
                return
            if session.stream.received - self._acknowledged >= ACKNOWLEDGED_AFTER:
                session.news.set()

    async def write(self) -> None:
        """Send what the client does not have, until the session ends or another connection carries it."""
        session, stream = self._session, self._session.stream
        sent = stream.acknowledged
        while session.connection is self:
            session.news.clear()
            behind = stream.received - self._acknowledged
            if sent < stream.sent or behind >= ACKNOWLEDGED_AFTER or self._acknowledged < 0:
                self._acknowledged = stream.received
                frame, sent = stream.frame(sent)
                await self._websocket.send_text(frame.decode())
            elif session.ended:
                await self._close(CLOSE_ENDED, "the session has ended")
                return
            else:
                await session.news.wait()
        await self._close(CLOSE_REPLACED, "another connection carries the session")

    async def _close(self, code: int, reason: str) -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            short = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
            await self._websocket.close(code, short)
