"""Answers to model calls: whole, or as server-sent events while the replies of all choices are sampled together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from palestra.errors import PalestraError
from palestra.http.errors import ErrorForm, Failure
from palestra.http.protocol import until_disconnect
from palestra.http.sse import AS_IT_COMES, MEDIA_TYPE
from palestra.server.auth import Caller
from palestra.server.dialects.base import EventWriter
from palestra.session import CallMaker, Listener, ReplyPiece, Sessions
from palestra.session.request import Relay
from palestra.session.sampling import overruled
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest
from palestra.waiting import cancelled

log = logging.getLogger("palestra.server")
STALLED_SECONDS = 60.0  # a client that reads nothing of a stream for so long counts as disconnected
OVERRULED = "x-palestra-sampling"  # header: sampling parameters that the job has set instead of the caller


async def sample_calls(
    session: CallMaker, calls: Sequence[GenerationRequest], listener: Listener | None = None
) -> tuple[Chat, ...]:
    """Sample all choices of all calls concurrently, in the order of their calls.

    If one call fails, the others are cancelled.

    The event loop serves other requests between the starts of two calls, and no call starts after a failure.

    Args:
        listener: notified of all choices, numbered consecutively over the calls.
    """
    if len(calls) == 1:
        return await session.generate(calls[0], listener)
    tasks: list[asyncio.Task[tuple[Chat, ...]]] = []
    first, failure = 0, None
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                numbered = None if listener is None else Relay(listener, first)
                tasks.append(group.create_task(session.generate(call, numbered)))
                first += call.choices
                await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        failure = errors.exceptions[0]
    try:
        if failure is not None:
            raise failure
        return tuple(chat for task in tasks for chat in task.result())
    finally:
        # Break the cycle error → traceback → frame → error, so that the request is freed now: GC runs rarely.
        del failure, tasks


class StreamedAnswer(Response):
    """Events sent during sampling.

    If the client disconnects, or does not read for a minute, the calls are cancelled. A failure before the first event
    is answered with its own status; a later one is the stream's last event.
    """

    def __init__(
        self,
        sessions: Sessions,
        caller: Caller,
        calls: Sequence[GenerationRequest],
        writer: EventWriter,
        error_form: ErrorForm,
    ) -> None:
        """Prepare the answer; nothing is sampled before the answer is called. `sessions`: the job's sessions, which
        admit or refuse the request. `error_form`: makes the dialect's form of an error.
        """
        super().__init__()
        self._sessions, self._caller, self._calls = sessions, caller, calls
        self._writer, self._error_form = writer, error_form
        self._ready = asyncio.Event()  # set when there are events to send
        self._note: str | None = None
        self._begun = False  # whether the status line has been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sample the calls and send the events."""
        session = await self._sessions.enter(self._caller)
        try:
            await until_disconnect(scope, self._stream(session, send))
        except ClientDisconnect:
            pass  # a retry returns the calls that were committed; the others are not kept
        except TimeoutError:
            log.info("%s: the client takes nothing; its call is given up", scope["path"])
        finally:
            self._sessions.leave(session)

    # These three methods make the answer a `Listener`: it keeps the header's value and forwards to the writer.

    def started(self, choice: int, chat: Chat) -> None:
        """Forward the start of a choice to the writer, and store the value of the header `x-palestra-sampling`."""
        if choice == 0:
            self._note = overruled(self._calls[0], chat.sampling)
        self._writer.started(choice, chat)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """Forward a piece of a choice to the writer, and wake the sending task."""
        self._writer.sampled(choice, piece)
        self._ready.set()

    def finished(self, choice: int, chat: Chat) -> None:
        """Forward the end of a choice to the writer, and wake the sending task."""
        self._writer.finished(choice, chat)
        self._ready.set()

    async def _stream(self, session: CallMaker, send: Send) -> None:
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
            session.delivered(*(() if isinstance(outcome, Exception) else outcome))
        finally:
            await cancelled(sampling)
            # Break the cycle error → traceback → frame → error, as in `sample_calls`.
            del sampling, outcome

    async def _sample(self, session: CallMaker) -> tuple[Chat, ...] | Exception:
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
    """Send a message to the client."""
    async with asyncio.timeout(STALLED_SECONDS):
        await send(message)
