"""HTTP of a live run: its routes, and the calls of an application, which name a session and no episode."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from codecs import BOM_UTF8
from functools import partial
from typing import Any

import orjson
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.errors import InvalidRequest, NotFound, PalestraError
from palestra.http.app import GuardedApp
from palestra.http.bodies import LONG_BODY, check_size, read_request, read_with
from palestra.http.guard import Direct, bearer
from palestra.server import DataPlane
from palestra.server.auth import require_job
from palestra.server.dialects import DIALECTS
from palestra.store.key_files import sign
from palestra.types.messages import ChatMessage
from palestra.types.wire import Body
from palestra_live.feedback import FeedbackBody, checked_feedback
from palestra_live.forgetting import Forgotten
from palestra_live.sessions import PRIVATE, LiveSession, LiveSessions
from palestra_live.store import NewSession

log = logging.getLogger("palestra.live")
SESSION, SUBJECT, CLUSTER, TRAIN = (f"x-palestra-{name}" for name in ("session", "subject", "cluster", "train"))
RECORDED = "x-palestra-recorded"  # of an answer: whether the call is recorded
OWN_PATHS = frozenset({"/live/sessions", "/live/forget", "/feedback"})
CALLS = frozenset({each.path for each in DIALECTS} | {each.counter.path for each in DIALECTS if each.counter})
_NAME = re.compile(r"[!-~]{1,128}")
NAME = Field(None, pattern=r"^[!-~]{1,128}$")


class SessionBody(Body):
    """The body of `POST /live/sessions`."""

    id: str | None = NAME
    subject: str | None = NAME
    cluster: str | None = NAME
    train: bool = Field(False, strict=True, description="Whether the subject consents to recording and training.")


class LiveSessionAnswer(BaseModel):
    """The answer to `POST /live/sessions`: what the session is called, and what serves it until its end."""

    session: str
    policy: str
    train: bool


class FeedbackAnswer(BaseModel):
    """The answer to `POST /feedback`; `repeated`: it was stored before."""

    stored: bool = True
    repeated: bool


class ForgetBody(Body):
    """The body of `POST /live/forget`."""

    subject: str = Field(min_length=1, max_length=128)


class LiveApp:
    """A job's application, in front of which the calls of a live application find their sessions."""

    def __init__(self, app: GuardedApp, plane: DataPlane, sessions: LiveSessions) -> None:
        self.app: ASGIApp = self
        self._inner, self._plane, self._sessions = app, plane, sessions
        self.gather = sessions.gather

    @property
    def live_key(self) -> str:
        """Return the application's key, which opens model calls, sessions and feedback."""
        return live_key(self._plane)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (called by the server)."""
        keys = self._plane.keys
        if scope["type"] != "http" or not self._is_ours(bearer(Request(scope)) or ""):
            await self._inner(scope, receive, send)
        elif scope["path"] in CALLS and scope["method"] == "POST":
            try:
                await self._call(scope, receive, send)
            except ClientDisconnect:
                return
            except PalestraError as error:
                await self._inner.guard.answers.answer(scope["path"], error)(scope, receive, send)
        elif scope["path"] in OWN_PATHS:
            await self._inner(_with_key(scope, keys.job_key), receive, send)
        elif scope["path"] == "/v1/models":
            await self._inner(_with_key(scope, keys.playground_key), receive, send)
        else:
            await self._inner(scope, receive, send)

    def _is_ours(self, key: str) -> bool:
        good = (self.live_key, self._plane.keys.job_key)
        return any([hmac.compare_digest(key.encode(), each.encode()) for each in good])

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a model call under the key of its session's episode, or unrecorded."""
        request, guard = Direct(scope, receive), self._inner.guard
        try:
            await request.take(guard, self._plane.config.server.max_body_bytes)
            asked = await read_with(_object_of, request, self._plane.pool)
        finally:
            guard.held -= request.seen
        session = await self._session_of(request, asked)
        private = list[str]()
        PRIVATE.set(private)
        with session.calling():
            recorded = session.train and not await self._sessions.redaction.finds_in_thread(asked)
            key = await self._sessions.recorded_by(session) if recorded else self._plane.keys.playground_key
            written = partial(_written, asked | {"model": session.policy})
            body = written() if request.seen < LONG_BODY else await self._plane.pool.run(written)
            status, started = 500, time.monotonic()

            async def answer(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status, kept = message["status"], b"1" if recorded and not private else b"0"
                    headers = [(SESSION.encode(), session.session_id.encode()), (RECORDED.encode(), kept)]
                    message = {**message, "headers": [*message.get("headers", ()), *headers]}
                await send(message)

            try:
                await self._inner(_with_key(scope, key, len(body)), _replayed(body, receive), answer)
            finally:
                if session.stored and scope["path"] in _ANSWERED:
                    await self._count(session, time.monotonic() - started, status >= 500, recorded and not private)

    async def _count(self, session: LiveSession, seconds: float, failed: bool, recorded: bool) -> None:
        """Count a call that was answered; that it can't be counted is no error of the answer."""
        try:
            name = session.session_id
            await self._sessions.store.count_call(name, seconds=seconds, failed=failed, recorded=recorded)
        except PalestraError as error:
            log.error("a call of session %s is not counted: %s", session.session_id, error)

    async def _session_of(self, request: Direct, asked: dict[str, Any]) -> LiveSession:
        """Return the session that a call names, or whose conversation it continues; opened if it is new. A call without
        either has its own, which is stored nowhere if the subject does not consent.
        """
        headers = request.headers
        for key in (SESSION, SUBJECT, CLUSTER):
            if key in headers and _NAME.fullmatch(headers[key]) is None:
                raise InvalidRequest(f"{key} has 1 to 128 visible ASCII characters, without spaces", key)
        if (consent := headers.get(TRAIN, "false").lower()) not in ("true", "false"):
            raise InvalidRequest(f"{TRAIN} is `true` or `false`, and not {consent[:40]!r}", TRAIN)
        name, subject, train = headers.get(SESSION), headers.get(SUBJECT), consent == "true"
        if name is None and (train or TRAIN not in headers) and request.url.path in _PARSERS:
            name = await self._continued(request, asked, subject) or (secrets.token_hex(16) if train else None)
        if name is None:
            return await self._sessions.unstored(subject)
        known = await self._sessions.find(name, missing_ok=True)
        if known is not None:
            subject = headers.get(SUBJECT, known.subject)
            train = train if TRAIN in headers else known.train
        return await self._sessions.open(
            NewSession(session_id=name, subject=subject, cluster=headers.get(CLUSTER), train=train)
        )

    async def _continued(self, request: Direct, asked: dict[str, Any], subject: str | None) -> str | None:
        """Return the open session whose calls the messages of a request continue; None: they continue none."""
        if not len(self._sessions.conversations):
            return None

        def messages() -> tuple[ChatMessage, ...]:
            body = _written(asked | {"model": "any"})
            return _PARSERS[request.url.path](body, request.headers).calls[0].messages

        found = messages() if request.seen < LONG_BODY else await self._plane.pool.run(messages)
        return self._sessions.conversations.find(subject, found)


_PARSERS = {each.path: each.parse for each in DIALECTS}
_ANSWERED = frozenset(_PARSERS)


def live_key(plane: DataPlane) -> str:
    """Return the key of a run's application, derived from the present secret."""
    return f"pl-{sign(plane.keys.secret(), plane.config.name, 'live')}"


def _object_of(body: bytes) -> dict[str, Any]:
    check_size(body)
    try:
        asked = orjson.loads(body.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise InvalidRequest("the body is no JSON object")
    return asked


def _written(asked: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(asked)
    except TypeError:
        raise InvalidRequest("the body is nested too deep") from None


def _with_key(scope: Scope, key: str, length: int | None = None) -> Scope:
    """Return the scope of a request with another key, and a body of another length."""
    replaced = {b"authorization", b"x-api-key"} | (
        {b"content-length", b"transfer-encoding"} if length is not None else set()
    )
    headers = [(name, value) for name, value in scope["headers"] if name not in replaced]
    headers.append((b"authorization", b"Bearer " + key.encode()))
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    return {**scope, "headers": headers}


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body once."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return messages.pop() if messages else await receive()

    return give


def add_live_routes(app: GuardedApp, plane: DataPlane, sessions: LiveSessions) -> None:
    """Add the routes of sessions, feedback and deletion; all take the job's key, or the application's."""

    async def open_session(request: Request) -> LiveSessionAnswer:
        """Open a session. With an id, repeating it changes nothing."""
        require_job(request)
        body = await read_request(SessionBody, request, plane.pool)
        name = body.id or secrets.token_hex(16)
        new = NewSession(session_id=name, subject=body.subject, cluster=body.cluster, train=body.train)
        session = await sessions.open(new)
        return LiveSessionAnswer(session=session.session_id, policy=session.policy, train=session.train)

    async def give_feedback(request: Request) -> FeedbackAnswer:
        """Store feedback. It is on disk when this is answered; a repeated `id` changes nothing."""
        require_job(request)
        body = await read_request(FeedbackBody, request, plane.pool)
        for kind in ("edit", "critique"):
            if await sessions.redaction.finds_in_thread(getattr(body, kind)):
                raise InvalidRequest(f"{kind} has a private text (live.redact), and is not stored; leave it out", kind)
        row = await sessions.store.find(body.session)
        calls = set[str]()
        if row is not None and row["episode_id"] is not None and (body.call or body.preferred):
            _, chats = await plane.store.calls.of_lease(row["episode_id"], row["fence"])
            calls = {str(chat.index) for chat in chats}

        def number_of(call: str, field: str) -> int:
            beginning = "" if row is None else f"-{row['episode_id']}-{row['fence']}-"
            _, found, number = call.rpartition(beginning or "-")
            if row is not None and not (found and number in calls):
                raise NotFound(f"{field} is {call!r}, which is no recorded reply of session {body.session!r}")
            return int(number) if number in calls else 0

        new = await sessions.store.add_feedback(checked_feedback(body, number_of))
        return FeedbackAnswer(repeated=not new)

    async def forget_subject(request: Request) -> Forgotten:
        """Delete what the sessions of a subject have said, and answer which versions were trained on it."""
        require_job(request)
        body = await read_request(ForgetBody, request, plane.pool)
        return await sessions.forget(body.subject)

    for path, endpoint, kind in (
        ("/live/sessions", open_session, SessionBody),
        ("/feedback", give_feedback, FeedbackBody),
        ("/live/forget", forget_subject, ForgetBody),
    ):
        app.add_direct(path, endpoint, kind, tags=["live"])
