"""Errors as answers: the same status and headers on every route, and a body in the form that its clients read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from palestra.errors import InvalidRequest, PalestraError, TooManyRequests

log = logging.getLogger("palestra.http")
INTERNAL = "an internal error; see the server's log"
CLIENT_GONE = 499  # nginx's status for a client that closed the connection before it was answered
_BASES = (
    "The base_url of an OpenAI client ends with a single /v1 (episode.base_url), that of an Anthropic client with none "
    "(episode.anthropic_url), and so does the URL of Palestra's own client"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The parts of an error answer, independent of a dialect.

    Attributes:
        code: stable name, such as `episode_lease_expired`.
        field: path of the wrong field of the request; None: no single field.
    """

    status: int
    message: str
    code: str
    field: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return what clients may know about `error`: only `INTERNAL` unless it was raised on purpose."""
        if not isinstance(error, PalestraError):
            return cls(status=500, message=INTERNAL, code="internal_error")
        field = error.field if isinstance(error, InvalidRequest) else None
        return cls(status=error.http_status, message=str(error), code=error.code, field=field)


ErrorForm = Callable[[Failure], dict[str, Any]]


def openai_error(failure: Failure) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form, which Palestra's own routes use too."""
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    return {"error": {"message": failure.message, "type": kind, "code": failure.code, "param": failure.field}}


class ErrorAnswers:
    """Turns errors of routes into answers, in the form that the route's clients expect."""

    def __init__(self, forms: Mapping[str, ErrorForm]) -> None:
        """Create the answers. `forms`: error form by path prefix; others have OpenAI's form."""
        self._forms = tuple(forms.items())

    def answer(self, path: str, error: PalestraError) -> JSONResponse:
        """Return the answer to a failed request of `path`."""
        failure = Failure.of(error)
        return JSONResponse(self._body(path, failure), failure.status, retry_headers(error))

    def unexpected(self, method: str, path: str, error: Exception) -> JSONResponse:
        """Return the answer to a request that failed for no reason that its client could know, and log the reason."""
        log.error("%s %s failed", method, path, exc_info=error)
        return JSONResponse(self._body(path, Failure.of(error)), 500)

    def install(self, app: FastAPI) -> None:
        """Make `app` answer all errors of its routes with this object."""
        app.add_exception_handler(PalestraError, self._palestra_error)
        app.add_exception_handler(RequestValidationError, self._validation_error)
        app.add_exception_handler(HTTPException, self._http_error)
        app.add_exception_handler(ClientDisconnect, self._client_gone)
        app.add_exception_handler(Exception, self._unexpected_error)

    def _body(self, path: str, failure: Failure) -> dict[str, Any]:
        form = next((form for beginning, form in self._forms if path.startswith(beginning)), openai_error)
        return form(failure)

    async def _palestra_error(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, PalestraError)
        return self.answer(request.url.path, error)

    async def _validation_error(self, request: Request, error: Exception) -> JSONResponse:
        """Answer a wrong value in a query or a header; bodies are checked by `http.bodies`."""
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return self.answer(request.url.path, InvalidRequest(f"{place}: {first['msg']}", place))

    async def _http_error(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path = request.url.path
        message = f"{request.method} {path}: {error.detail}"
        if error.status_code == 404 and (meant := _meant(path, request.app)):
            message += f"; did you mean {meant}? " + _BASES
        failure = Failure(status=error.status_code, message=message, code="http_error")
        return JSONResponse(self._body(path, failure), error.status_code, error.headers)

    async def _client_gone(self, request: Request, error: Exception) -> Response:
        """Return an answer that no client receives, because a client's disconnect is no failure of the server."""
        return Response(status_code=CLIENT_GONE)

    async def _unexpected_error(self, request: Request, error: Exception) -> JSONResponse:
        return self.unexpected(request.method, request.url.path, error)


def retry_headers(error: PalestraError) -> dict[str, str]:
    """Return the headers that say whether, and when, a client should retry."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if isinstance(error, TooManyRequests):
        headers["retry-after"] = f"{max(1, round(error.retry_after_seconds))}"
    return headers


def _meant(path: str, app: FastAPI) -> str | None:
    """Return the route that a client with a wrong base URL meant, with fewer or more `/v1`; None: no such route."""
    wanted = _without_version(path)
    return next((known for known in app.openapi()["paths"] if _without_version(known) == wanted), None)


def _without_version(path: str) -> str:
    """Return the path without the `/v1` that it begins with, however often."""
    while path.startswith("/v1/"):
        path = path[len("/v1") :]
    return path
