"""What every application of ours has: one shape for all errors, a key before a body is read, and a limit on bodies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.errors import InvalidRequest, PalestraError, PayloadTooLarge, TooManyRequests
from palestra.gateway.errors import body_of, error_body, headers_of
from palestra.gateway.http_protocol import CONNECTION
from palestra.schemas.wire import ErrorAnswer

log = logging.getLogger("palestra.gateway")
BODY_SECONDS = 60.0  # a body of which nothing comes for so long is given up
WHOLE_BODY_SECONDS = 600.0  # and so is one that is not complete then
BODIES_HELD = 64  # so many bodies of the largest size may be held at the same time
PUBLIC = ("/openapi.json",)  # answered without a key
# Checks the key of a request, and returns how many bytes its body may have. It must not read the body.
Authenticate = Callable[[Request], Awaitable[int]]
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer} for code in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


def application(
    title: str, description: str, authenticate: Authenticate, max_body_bytes: int, public: Collection[str] = PUBLIC
) -> FastAPI:
    """Return an application without routes, in which errors become answers and every request needs a key.

    Args:
        title: of the OpenAPI document.
        description: likewise.
        authenticate: called for each request before anything of its body is read; raises what is wrong with its key.
        max_body_bytes: no body may have more, whoever sends it.
        public: paths that are answered without a key.
    """
    app = FastAPI(
        title=title,
        version=version("palestra"),
        description=description,
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(PalestraError, _palestra_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected_error)
    app.add_middleware(RequestGuard, authenticate=authenticate, max_bytes=max_body_bytes, public=public)
    return app


class RequestGuard:
    """Checks the key of every request before its body is read, and limits the body's size and time.

    It stands before all routes, so that a new route can't forget it. What all requests together have sent is limited,
    too, so that no number of clients can fill the memory.
    """

    def __init__(self, app: ASGIApp, authenticate: Authenticate, max_bytes: int, public: Collection[str]) -> None:
        self._app, self._authenticate, self._max, self._public = app, authenticate, max_bytes, frozenset(public)
        self._held = 0  # bytes of the bodies of all requests that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            most = await self._most_bytes(scope)
        except PalestraError as error:
            await _answer(error, scope["path"])(scope, receive, send)
            return
        seen, complete, until = 0, False, asyncio.get_running_loop().time() + WHOLE_BODY_SECONDS

        async def limited() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()
            left = min(BODY_SECONDS, until - asyncio.get_running_loop().time())
            try:
                message = await asyncio.wait_for(receive(), max(left, 0.0))
            except TimeoutError:
                raise InvalidRequest(f"nothing more of the body came for {left:.3g} s") from None
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
        """Return how long the body may be, by the key and by what the request says of it.

        Raises:
            PalestraError: the key is not good, or the body is too long.
        """
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


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over the limit of {most} bytes")


def _answer(error: PalestraError, path: str) -> JSONResponse:
    return JSONResponse(body_of(path, error), error.http_status, headers_of(error))


async def _palestra_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PalestraError)
    return _answer(error, request.url.path)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = first["msg"] if first["type"] != "json_invalid" else f"the body is not valid JSON: {first['msg']}"
    return _answer(InvalidRequest(f"{place}: {message}" if place else message, place or None), request.url.path)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if isinstance(error.__cause__, PalestraError):  # FastAPI wraps whatever happens while it reads a body
        return _answer(error.__cause__, path)
    if isinstance(error.__cause__, RecursionError):
        return _answer(InvalidRequest("the body is not valid JSON: it is nested too deep"), path)
    message = f"{request.method} {path}: {error.detail}"
    if error.status_code == 404 and (meant := _meant(path, request.app)):
        message += f"; did you mean {meant}? " + _BASES
    return JSONResponse(error_body(path, error.status_code, message, "http_error"), error.status_code, error.headers)


_BASES = (
    "The base_url of an OpenAI client ends with a single /v1 (episode.base_url), that of an Anthropic client with none "
    "(episode.anthropic_url), and so does the URL of Palestra's own client"
)


def _meant(path: str, app: FastAPI) -> str | None:
    """Return the route that a client with a wrong base URL asks for: one with other beginnings of /v1."""
    wanted = _without_version(path)
    return next((known for known in app.openapi()["paths"] if _without_version(known) == wanted), None)


def _without_version(path: str) -> str:
    while path.startswith("/v1/"):
        path = path[len("/v1") :]
    return path


async def _client_gone(request: Request, error: Exception) -> Response:
    """Make an answer that nobody gets. A client that goes away is no event: its lease, or its retry, tells of it."""
    return Response(status_code=499)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(body_of(request.url.path, error), 500)
