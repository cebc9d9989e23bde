"""What every application of ours has: one shape for all errors, and a limit on bodies."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.errors import InvalidRequest, PalestraError, PayloadTooLarge, TooManyRequests
from palestra.gateway.errors import body_of, error_body, headers_of
from palestra.schemas.wire import ErrorAnswer

log = logging.getLogger("palestra.gateway")
BODY_SECONDS = 60.0  # a body of which nothing comes for so long is given up
BODIES_HELD = 64  # so many bodies of the largest size may be held at the same time
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer} for code in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


def application(title: str, description: str, max_body_bytes: int) -> FastAPI:
    """An application without routes yet, in which errors become answers, and larger bodies are refused."""
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
    app.add_exception_handler(Exception, _unexpected_error)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    return app


class BodyLimit:
    """Refuses bodies over a size, by their header or while they arrive; also those that stop arriving.

    What all requests together have sent is limited, too, so that no number of clients can fill the memory.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max = app, max_bytes
        self._held = 0  # bytes of the bodies of all requests that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._max:
            await _answer(self._too_large(), scope["path"])(scope, receive, send)
            return
        seen, complete = 0, False

        async def limited() -> Message:
            nonlocal seen, complete
            try:
                message = await (receive() if complete else asyncio.wait_for(receive(), BODY_SECONDS))
            except TimeoutError:
                raise InvalidRequest(f"nothing more of the body came for {BODY_SECONDS:g} s") from None
            size = len(message.get("body", b""))
            seen, self._held = seen + size, self._held + size
            complete = not message.get("more_body", False)
            if seen > self._max:
                raise self._too_large()
            if self._held > BODIES_HELD * self._max:
                raise TooManyRequests("the requests that are being answered fill the memory for bodies; try again soon")
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held -= seen

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is over the limit of {self._max} bytes")


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
    return JSONResponse(error_body(path, error.status_code, message, "http_error"), error.status_code, error.headers)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(body_of(request.url.path, error), 500)
