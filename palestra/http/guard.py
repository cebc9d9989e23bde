"""The check of every request before its route: its key, and the size and time of its body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.errors import InvalidRequest, PalestraError, PayloadTooLarge, TooManyRequests
from palestra.http.errors import CLIENT_GONE, ErrorAnswers
from palestra.http.protocol import CONNECTION, until_disconnect

BODY_SECONDS = 60.0  # longest pause within a body
WHOLE_BODY_SECONDS = 600.0  # longest time until a body is complete
BODIES_HELD = 32  # how many bodies of the largest size are held at the same time
_JSON = (b"content-type", b"application/json")
_READING = ("GET", "HEAD", "OPTIONS")
# Checks the key of a request, and returns how many bytes its body may have. Must not read the body.
Authenticate = Callable[[Request], Awaitable[int]]
OnRefused = Callable[[Scope, PalestraError], None]


class JsonAnswer(NamedTuple):
    """An answer of bytes that are JSON, with more headers; `sent` is called after its last byte was sent."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    sent: Callable[[], object] | None = None


Endpoint: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response | BaseModel | JsonAnswer]]


class RequestGuard:
    """Checks the key of every request before its body is read, and limits the body's size and time.

    It stands before all routes, so that a new one cannot forget it. The bodies of all requests together are limited as
    well, so that no number of clients can fill the memory.
    """

    def __init__(
        self,
        authenticate: Authenticate,
        max_bytes: int,
        public: Collection[str],
        answers: ErrorAnswers,
        on_refused: OnRefused | None = None,
    ) -> None:
        """Prepare to guard an application.

        Args:
            authenticate: raises if a request's key is not good, and returns how many bytes its body may have.
            max_bytes: the longest body, also if `authenticate` allows more.
            public: paths that need no key, and take no body.
            answers: gives refusals the form of their route.
            on_refused: called before a refused request of a direct route is answered.
        """
        self._authenticate, self.max, self._public = authenticate, max_bytes, frozenset(public)
        self.answers, self._on_refused = answers, on_refused
        self.held = 0  # bytes of the bodies of all requests that are being answered

    async def pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request to an application, with its whole body."""
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        request = Direct(scope, receive)
        try:
            try:
                await self._admit(request)
            except ClientDisconnect:
                return
            except PalestraError as error:
                await self.answers.answer(scope["path"], error)(scope, receive, send)
                return
            await app(scope, request.receive_again, send)
        finally:
            self.held -= request.seen

    async def answer(self, endpoint: Endpoint, cancels: bool, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by an endpoint that gets it with its body, without an application in between. `cancels`:
        the endpoint is cancelled when the client disconnects.
        """
        request = Direct(scope, receive)
        try:
            await self._admit(request)
            found = await (until_disconnect(scope, endpoint(request)) if cancels else endpoint(request))
            if isinstance(found, Response):
                await found(scope, receive, send)
                return
            if isinstance(found, BaseModel):
                found = JsonAnswer(found.model_dump_json(by_alias=True).encode())
            headers = [*found.headers, (b"content-length", b"%d" % len(found.body)), _JSON]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": found.body})
            if found.sent is not None:
                found.sent()
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
        except PalestraError as error:
            if self._on_refused is not None:
                self._on_refused(scope, error)
            await self.answers.answer(scope["path"], error)(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - answered as an internal error, and logged
            await self.answers.unexpected(scope["method"], scope["path"], error)(scope, receive, send)
        finally:
            self.held -= request.seen

    async def _admit(self, request: Direct) -> None:
        """Check the key of a request and the declared length of its body, then read it.

        Requests for a public path, and those that only read, are answered without their body.
        """
        scope, most = request.scope, 0
        if known := scope["path"] not in self._public:
            most = min(self.max, await self._authenticate(request))
            if (connection := scope.get(CONNECTION)) is not None:
                connection.known = True
        declared = request.headers.get("content-length", "0").lstrip("0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            raise _too_large(most)
        if known and scope["method"] not in _READING:
            await request.take(self, most)


class Direct(Request):
    """A request whose headers are a dict, by names in lower case, and whose body is read before its endpoint runs.

    Attributes:
        seen: bytes of the body that were received.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.seen, self._again = 0, False
        headers: dict[str, str] = {}
        for name, value in reversed(scope["headers"]):  # the first of two headers with one name counts
            headers[name.decode("latin-1")] = value.decode("latin-1")
        self._headers = headers  # type: ignore[assignment]

    async def take(self, guard: RequestGuard, most: int) -> None:
        """Read the body, which may have `most` bytes. Raises ClientDisconnect: the client closed the connection. Raises
        PayloadTooLarge, TooManyRequests, InvalidRequest: it is too large, alone or with those of other requests, or too
        late.
        """
        connection, until, pieces = self.scope.get(CONNECTION), 0.0, list[bytes]()
        while True:
            if connection is not None and connection.has_whole_body:
                message = await self._receive()
            else:
                until = until or asyncio.get_running_loop().time() + WHOLE_BODY_SECONDS
                message = await self._next(until)
            pieces.append(message.get("body", b""))
            self.seen += len(pieces[-1])
            guard.held += len(pieces[-1])
            if self.seen > most:
                raise _too_large(most)
            if guard.held > BODIES_HELD * guard.max:
                raise TooManyRequests("the requests that are being answered fill the memory for bodies; try again soon")
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if not message.get("more_body", False):
                self._body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                return

    async def receive_again(self) -> Message:
        """Return the body that was read, if it was, then the messages that follow it."""
        if self._again or not hasattr(self, "_body"):
            return await self._receive()
        self._again = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _next(self, until: float) -> Message:
        """Return the next message, before the time `until` of the loop's clock."""
        left = min(BODY_SECONDS, until - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(max(left, 0.0)):
                return await self._receive()
        except TimeoutError:
            late = (
                f"nothing more of the body came for {BODY_SECONDS:g} s"
                if left == BODY_SECONDS
                else f"the body had not come to its end after {WHOLE_BODY_SECONDS:g} s"
            )
            raise InvalidRequest(late) from None


def bearer(request: Request) -> str | None:
    """Return the key of a request from `Authorization: Bearer` or from `x-api-key`, which Anthropic's client sends."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key")


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over the limit of {most} bytes")
