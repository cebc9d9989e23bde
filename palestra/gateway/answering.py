"""From calls to an answer: whole, or as server-sent events while the replies are sampled."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from palestra.errors import PalestraError
from palestra.gateway.bodies import disconnected, until_disconnect
from palestra.gateway.callers import OpenSession
from palestra.gateway.errors import body_of
from palestra.gateway.plane import DataPlane
from palestra.schemas.records import Chat
from palestra.session import CallStart, GenerationRequest, Listener, ReplyPiece, Session
from palestra.session.sampling import overruled

Top = Sequence[Sequence[tuple[int, float]]]  # for each token (token, logprob) of the most probable

log = logging.getLogger("palestra.gateway")
MANY_TOKENS = 4096  # the most, logprobs of others at their places included, whose answer is built on the event loop
STALLED_SECONDS = 60.0  # a client that takes nothing of a stream for so long is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """The choices of a request, in order, as they are recorded."""

    chats: tuple[Chat, ...]
    top: Sequence[Top]  # for each choice; empty where it was not asked for, or the answer is a recorded one


class EventWriter(ABC):
    """Writes what is heard of the choices as events. A `Listener`; choices of several calls are numbered on."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self._written: list[bytes] = []

    def write(self, data: Mapping[str, Any] | bytes, event: str | None = None) -> None:
        """Add an event."""
        body = data if isinstance(data, bytes) else orjson.dumps(data)
        head = b"" if event is None else b"event: " + event.encode() + b"\n"
        self._written.append(head + b"data: " + body + b"\n\n")

    def take(self) -> bytes:
        """What was written since the last time."""
        written = b"".join(self._written)
        self._written.clear()
        self.ready.clear()
        return written

    @abstractmethod
    def started(self, choice: int, start: CallStart) -> None:
        """See `Listener`."""

    @abstractmethod
    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """See `Listener`."""

    @abstractmethod
    def finished(self, choice: int, chat: Chat) -> None:
        """See `Listener`."""

    @abstractmethod
    def ended(self, chats: Sequence[Chat]) -> None:
        """All choices are finished."""

    def failed(self, body: Mapping[str, Any]) -> None:
        """It can't be finished; `body` is what an answer without streaming would have said."""
        self.write(body)


async def answer(
    request: Request,
    plane: DataPlane,
    session_of: OpenSession,
    calls: Sequence[GenerationRequest],
    whole: Callable[[Played], Mapping[str, Any]],
    writer: EventWriter | None,
) -> Response:
    """Play calls and answer with all of their choices, by `whole`, or through `writer` while they are sampled."""
    if writer is not None:
        return _Stream(plane, session_of, calls, writer)
    with plane.sessions.admitted():
        async with session_of() as session:
            return await _answer_whole(request, plane, session, calls, whole)


async def _answer_whole(
    request: Request,
    plane: DataPlane,
    session: Session,
    calls: Sequence[GenerationRequest],
    whole: Callable[[Played], Mapping[str, Any]],
) -> Response:
    collector = _TopLogprobs() if any(call.top_logprobs for call in calls) else None
    chats = await until_disconnect(request, play(session, calls, collector))
    top = [()] * len(chats) if collector is None else [collector.top[n] for n in range(len(chats))]
    played = Played(chats=chats, top=top)
    tokens = sum(len(chat.completion_ids) for chat in chats)
    long = tokens * (1 + max(call.top_logprobs for call in calls)) > MANY_TOKENS
    body = await plane.pool.run(_body, whole, played) if long else _body(whole, played)
    return _Whole(session, chats, body, _overruled(calls, chats))


def _body(whole: Callable[[Played], Mapping[str, Any]], played: Played) -> bytes:
    return orjson.dumps(whole(played))


async def play(session: Session, calls: Sequence[GenerationRequest], listener: Listener | None) -> tuple[Chat, ...]:
    """Play all choices of all calls at the same time; return them in order. If a call fails, cancel the others.

    Other requests are served between the starts of two calls, and no call is started after one has failed.
    """
    if len(calls) == 1:
        return await session.generate(calls[0], listener)
    first = 0
    tasks: list[asyncio.Task[tuple[Chat, ...]]] = []
    failed = asyncio.Event()
    try:
        for call in calls:
            numbered = None if listener is None else _Numbered(listener, first)
            task = asyncio.ensure_future(session.generate(call, numbered))
            task.add_done_callback(lambda done: failed.set() if done.cancelled() or done.exception() else None)
            tasks.append(task)
            first += call.choices
            await asyncio.sleep(0)
            if failed.is_set():
                break
        return tuple(chat for chats in await asyncio.gather(*tasks) for chat in chats)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _Numbered:
    """The choices of a call that is not the first of its request."""

    def __init__(self, listener: Listener, first: int) -> None:
        self._listener, self._first = listener, first

    def started(self, choice: int, start: CallStart) -> None:
        self._listener.started(self._first + choice, start)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        self._listener.sampled(self._first + choice, piece)

    def finished(self, choice: int, chat: Chat) -> None:
        self._listener.finished(self._first + choice, chat)


class _TopLogprobs:
    """Keeps what the records do not have."""

    def __init__(self) -> None:
        self.top: defaultdict[int, list[Sequence[tuple[int, float]]]] = defaultdict(list)

    def started(self, choice: int, start: CallStart) -> None:
        pass

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        self.top[choice] += piece.top

    def finished(self, choice: int, chat: Chat) -> None:
        pass


def _overruled(calls: Sequence[GenerationRequest], chats: Sequence[Chat]) -> dict[str, str]:
    """The header that says what the job fixed against the caller's wish."""
    note = overruled(calls[0], chats[0].sampling)
    return {} if note is None else {"x-palestra-sampling": note}


class _Whole(Response):
    """Tells the session when the last byte has left."""

    def __init__(self, session: Session, chats: Sequence[Chat], body: bytes, headers: dict[str, str]) -> None:
        super().__init__(body, 200, headers, "application/json")
        self._session, self._chats = session, chats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        for chat in self._chats:
            self._session.delivered(chat)


class _Stream(Response):
    """Events while the replies are sampled. A client that goes away, or takes nothing, cancels them.

    Until there is a first event a failure is answered with its own status.
    """

    def __init__(
        self, plane: DataPlane, session_of: OpenSession, calls: Sequence[GenerationRequest], writer: EventWriter
    ) -> None:
        super().__init__()
        self._plane, self._session_of, self._calls, self._writer = plane, session_of, calls, writer
        self._note: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._plane.sessions.admitted():
            async with self._session_of() as session:
                await self._play(session, scope, receive, send)

    async def _play(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(play(session, self._calls, self))
        work.add_done_callback(lambda _: self._writer.ready.set())
        gone = asyncio.ensure_future(disconnected(receive))
        gone.add_done_callback(lambda _: work.cancel())
        try:
            await self._send(scope, send, work, gone)
            if not gone.done():
                for chat in work.result():
                    session.delivered(chat)
        except TimeoutError:
            log.info("%s: the client takes nothing; its call is given up", scope["path"])
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    # A `Listener`: notes what the headers say, and passes on

    def started(self, choice: int, start: CallStart) -> None:
        if choice == 0:
            self._note = overruled(self._calls[0], start.sampling)
        self._writer.started(choice, start)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        self._writer.sampled(choice, piece)
        self._writer.ready.set()

    def finished(self, choice: int, chat: Chat) -> None:
        self._writer.finished(choice, chat)
        self._writer.ready.set()

    async def _send(
        self, scope: Scope, send: Send, work: asyncio.Task[tuple[Chat, ...]], gone: asyncio.Task[None]
    ) -> None:
        begun = False
        while not work.done():
            await self._writer.ready.wait()
            begun = await self._pass_on(send, begun) or begun
        if gone.done():
            return
        error = None if work.cancelled() else work.exception()
        if error is None:
            self._writer.ended(work.result())
        elif begun:
            if not isinstance(error, PalestraError):
                log.error("%s failed while it was streamed", scope["path"], exc_info=error)
            self._writer.failed(body_of(scope["path"], error))
        else:
            raise error
        await self._pass_on(send, begun)
        await asyncio.wait_for(send({"type": "http.response.body", "body": b"", "more_body": False}), STALLED_SECONDS)

    async def _pass_on(self, send: Send, begun: bool) -> bool:
        """Send what there is, after the headers; False: there is nothing."""
        events = self._writer.take()
        if not events:
            return False
        if not begun:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            if self._note is not None:
                headers.append((b"x-palestra-sampling", self._note.encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = {"type": "http.response.body", "body": events, "more_body": True}
        await asyncio.wait_for(send(body), STALLED_SECONDS)
        return True
