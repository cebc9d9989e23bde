"""The ASGI application of a data plane: routes, one shape for all errors, and a limit on bodies."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.errors import InvalidRequest, PalestraError, PayloadTooLarge, TooManyRequests
from palestra.gateway.chat_api import add_chat_routes
from palestra.gateway.episode_api import add_episode_routes
from palestra.gateway.plane import DataPlane
from palestra.gateway.status_api import add_status_routes
from palestra.schemas.wire import ErrorAnswer

__all__ = ["DataPlane", "create_app"]

log = logging.getLogger("palestra.gateway")
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer} for code in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


def create_app(plane: DataPlane) -> FastAPI:
    """All routes of one job's data plane."""
    app = FastAPI(
        title="Palestra data plane",
        version=version("palestra"),
        description="Claim episodes, call the model, hand in rewards.",
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    add_chat_routes(app, plane)
    add_episode_routes(app, plane)
    add_status_routes(app, plane)
    app.add_exception_handler(PalestraError, _palestra_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    app.add_middleware(BodyLimit, max_bytes=plane.config.server.max_body_bytes)
    return app


class BodyLimit:
    """Refuses bodies over a size, by their header or while they arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._max:
            await _answer(self._too_large())(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is over the limit of {self._max} bytes")


def _answer(error: PalestraError) -> JSONResponse:
    field = error.field if isinstance(error, InvalidRequest) else None
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if isinstance(error, TooManyRequests):
        headers["retry-after"] = f"{max(1, round(error.retry_after_seconds))}"
    kind = "server_error" if error.http_status >= 500 else "invalid_request_error"
    body = {"error": {"message": str(error), "type": kind, "code": error.code, "param": field}}
    return JSONResponse(body, error.http_status, headers)


async def _palestra_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PalestraError)
    return _answer(error)


async def _validation_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = first["msg"] if first["type"] != "json_invalid" else f"the body is not valid JSON: {first['msg']}"
    return _answer(InvalidRequest(f"{place}: {message}" if place else message, place or None))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, PalestraError):  # FastAPI wraps whatever happens while it reads a body
        return _answer(error.__cause__)
    if isinstance(error.__cause__, RecursionError):
        return _answer(InvalidRequest("the body is not valid JSON: it is nested too deep"))
    body = {
        "message": f"{request.method} {request.url.path}: {error.detail}",
        "type": "invalid_request_error",
    }
    return JSONResponse({"error": {**body, "code": "http_error", "param": None}}, error.status_code, error.headers)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    body = {
        "message": "an internal error; see the server's log",
        "type": "server_error",
        "code": "internal_error",
    }
    return JSONResponse({"error": {**body, "param": None}}, 500)


def describe_api(plane: DataPlane) -> bytes:
    """The OpenAPI document, as `docs/api.md` is made from it."""
    return orjson.dumps(create_app(plane).openapi())
