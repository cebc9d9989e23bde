"""Answers to model calls: whole, or as server-sent events while the replies are sampled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from palestra.errors import PalestraError
from palestra.gateway.auth import OpenSession
from palestra.gateway.calls import sample_calls
from palestra.gateway.dialects.base import EventWriter
from palestra.http.disconnects import until_disconnect
from palestra.http.errors import ErrorForm, Failure
from palestra.http.sse import AS_IT_COMES, MEDIA_TYPE
from palestra.schemas.records import Chat
from palestra.session import CallStart, GenerationRequest, ReplyPiece, Session, Sessions
from palestra.session.sampling import overruled
from palestra.waiting import cancelled

log = logging.getLogger("palestra.gateway")
STALLED_SECONDS = 60.0  # a client that reads nothing of a stream for so long counts as disconnected
OVERRULED = "x-palestra-sampling"  # header: sampling parameters that the job has set instead of the caller


class WholeAnswer(Response):
    """A complete answer.

    The session is notified when its last byte has been sent: a later equal request is a new call.
    """

    def __init__(
        self, session: Session, calls: Sequence[GenerationRequest], chats: Sequence[Chat], body: bytes
    ) -> None:
        """Prepare the answer.

        Args:
            session: the session that made the calls.
            calls: the calls as they were requested.
            chats: the calls as they were recorded.
            body: the answer as JSON.
        """
        note = overruled(calls[0], chats[0].sampling)
        super().__init__(body, 200, None if note is None else {OVERRULED: note}, "application/json")
        self._session, self._chats = session, chats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, then notify the session that its calls were delivered."""
        await super().__call__(scope, receive, send)
        for chat in self._chats:
            self._session.delivered(chat)


class StreamedAnswer(Response):
    """Events that are sent while the replies are sampled.

    If the client disconnects, or reads nothing for a minute, the calls are cancelled. A failure before the first event
    is answered with its own status; a later one is the stream's last event.
    """

    def __init__(
        self,
        sessions: Sessions,
        open_session: OpenSession,
        calls: Sequence[GenerationRequest],
        writer: EventWriter,
        error_form: ErrorForm,
    ) -> None:
        """Prepare the answer; nothing is sampled before the answer is called.

        Args:
            sessions: the job's sessions, which admit or refuse the request.
            open_session: opens the session to make the calls in.
            calls: the calls to sample.
            writer: writes the dialect's events.
            error_form: makes the dialect's form of an error.
        """
        super().__init__()
        self._sessions, self._open_session, self._calls = sessions, open_session, calls
        self._writer, self._error_form = writer, error_form
        self._ready = asyncio.Event()  # set when there are events to send
        self._note: str | None = None
        self._begun = False  # whether the status line has been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sample the calls and send the events.

        Raises:
            PalestraError: the calls failed before anything was sent.
        """
        with self._sessions.admitted():
            async with self._open_session() as session:
                try:
                    await until_disconnect(receive, self._stream(session, send))
                except ClientDisconnect:
                    pass  # a retry returns the calls that were committed; the others are not kept
                except TimeoutError:
                    log.info("%s: the client takes nothing; its call is given up", scope["path"])

    # These three methods make the answer a `Listener`: it keeps the header's value and forwards to the writer.

    def started(self, choice: int, start: CallStart) -> None:
        """Forward the start of a choice to the writer, and keep the value of the header `x-palestra-sampling`."""
        if choice == 0:
            self._note = overruled(self._calls[0], start.sampling)
        self._writer.started(choice, start)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Forward a piece of a choice to the writer, and wake the sending task."""
        self._writer.sampled(choice, piece)
        self._ready.set()

    def finished(self, choice: int, chat: Chat) -> None:
        """Forward the end of a choice to the writer, and wake the sending task."""
        self._writer.finished(choice, chat)
        self._ready.set()

    async def _stream(self, session: Session, send: Send) -> None:
        """Send events while the choices are sampled, then the stream's end, or the failure."""
        sampling = asyncio.ensure_future(self._sample(session))
        sampling.add_done_callback(lambda _: self._ready.set())
        outcome: tuple[Chat, ...] | Exception | None = None
        try:
            while not sampling.done():
                await self._ready.wait()
                self._ready.clear()
                if not sampling.done():
                    await self._flush(send)
            outcome = sampling.result()
            if not isinstance(outcome, Exception):
                self._writer.ended(outcome)
            elif self._begun:
                self._write_failure(outcome)
            else:
                raise outcome
            await self._flush(send)
            await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})
            for chat in () if isinstance(outcome, Exception) else outcome:
                session.delivered(chat)
        finally:
            await cancelled(sampling)
            # The error refers to this frame: if the frame referred to the error, the request would stay in memory.
            del sampling, outcome

    async def _sample(self, session: Session) -> tuple[Chat, ...] | Exception:
        try:
            return await sample_calls(session, self._calls, self)
        except Exception as error:  # noqa: BLE001 - `_stream` raises the error, or writes it as an event
            return error

    def _write_failure(self, error: Exception) -> None:
        if not isinstance(error, PalestraError):
            log.error("a call failed while it was streamed", exc_info=error)
        self._writer.failed(self._error_form(Failure.of(error)))

    async def _flush(self, send: Send) -> None:
        """Send the events written so far, preceded by the headers the first time."""
        events = self._writer.take()
        if not events:
            return
        if not self._begun:
            self._begun = True
            await _send(send, {"type": "http.response.start", "status": 200, "headers": self._status_headers()})
        await _send(send, {"type": "http.response.body", "body": events, "more_body": True})

    def _status_headers(self) -> list[tuple[bytes, bytes]]:
        named = {"content-type": MEDIA_TYPE, **AS_IT_COMES} | ({} if self._note is None else {OVERRULED: self._note})
        return [(name.encode(), value.encode()) for name, value in named.items()]


async def _send(send: Send, message: Message) -> None:
    """Send a message to the client.

    Raises:
        TimeoutError: the client read nothing for `STALLED_SECONDS`.
    """
    async with asyncio.timeout(STALLED_SECONDS):
        await send(message)
