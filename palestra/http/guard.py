"""The check of every request before its route: its key, and the size and time of its body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.errors import Forbidden, InvalidRequest, PalestraError, PayloadTooLarge, TooManyRequests
from palestra.http.errors import ErrorAnswers
from palestra.http.protocol import CONNECTION

BODY_SECONDS = 60.0  # longest pause within a body
WHOLE_BODY_SECONDS = 600.0  # longest time until a body is complete
BODIES_HELD = 64  # how many bodies of the largest size are held at the same time
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
# Checks the key of a request, and returns how many bytes its body may have. Must not read the body.
Authenticate = Callable[[Request], Awaitable[int]]


class RequestGuard:
    """Checks the key of every request before its body is read, and limits the body's size and time.

    It is a middleware, so that new routes are covered. All bodies together are limited as well, so that no number of
    clients can fill the memory.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticate: Authenticate,
        max_bytes: int,
        public: Collection[str],
        answers: ErrorAnswers,
    ) -> None:
        """Guard an application.

        Args:
            authenticate: raises for an invalid key, and returns the limit of the body's bytes.
            max_bytes: upper limit, even if `authenticate` allows more.
            public: paths that need no key, and accept no body.
            answers: formats refusals.
        """
        self._app, self._authenticate, self._max, self._public = app, authenticate, max_bytes, frozenset(public)
        self._answers = answers
        self._held = 0  # bytes of the bodies of all requests that are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request to the application, with a `receive` that enforces the limits of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            most = await self._most_bytes(scope)
        except PalestraError as error:
            await self._answers.answer(scope["path"], error)(scope, receive, send)
            return
        seen, complete, until = 0, False, asyncio.get_running_loop().time() + WHOLE_BODY_SECONDS

        async def limited() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()
            left = min(BODY_SECONDS, until - asyncio.get_running_loop().time())
            try:
                async with asyncio.timeout(max(left, 0.0)):
                    message = await receive()
            except TimeoutError:
                late = (
                    f"nothing more of the body came for {BODY_SECONDS:g} s"
                    if left == BODY_SECONDS
                    else f"the body had not come to its end after {WHOLE_BODY_SECONDS:g} s"
                )
                raise InvalidRequest(late) from None
            size = len(message.get("body", b""))
            seen, self._held = seen + size, self._held + size
            complete = not message.get("more_body", False)
            if seen > most:
                raise _too_large(most)
            if self._held > BODIES_HELD * self._max:
                raise TooManyRequests("the requests that are being answered fill the memory for bodies; try again soon")
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held -= seen

    async def _most_bytes(self, scope: Scope) -> int:
        """Return how many bytes the body may have, after checking the key and the declared length."""
        if scope["path"] in self._public:
            most = 0
        else:
            most = min(self._max, await self._authenticate(Request(scope)))
            if (connection := scope.get(CONNECTION)) is not None:
                connection.known = True
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0").lstrip(b"0")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            raise _too_large(most)
        return most


def bearer(request: Request) -> str | None:
    """Return the key of a request from `Authorization: Bearer` or from `x-api-key`, which Anthropic's client sends."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key")


def check_local(request: Request) -> None:
    """Raise an error for a request that a web page of another server may have sent, on a server without keys.

    A page can make the browser send requests to this machine. Those without a preflight are forms or plain texts, and
    name the page in `Origin`. If the page's own name resolves to this machine, `Host` has that name.

    Raises:
        Forbidden: the request is for another host name than this machine's, or comes from another page.
        InvalidRequest: its body is not declared as JSON.
    """
    headers = request.headers
    hosts = headers.getlist("host")
    if len(hosts) != 1 or _LOCAL_HOST.fullmatch(hosts[0]) is None:
        raise Forbidden("this server asks for no keys, so it answers only under http://127.0.0.1, localhost or [::1]")
    foreign = any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin"))
    if foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Forbidden("this server asks for no keys, so it answers no page of another server")
    has_body = headers.get("content-length", "0").strip("0 ") != "" or "transfer-encoding" in headers
    if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest(
            "this server asks for no keys, so it takes bodies only with Content-Type: application/json"
        )


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over the limit of {most} bytes")
