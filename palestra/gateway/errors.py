"""Errors as answers, in the shape that the caller's client expects."""

from __future__ import annotations

from typing import Any

from palestra.errors import InvalidRequest, PalestraError, TooManyRequests

INTERNAL = "an internal error; see the server's log"
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    """Whether the route is of Anthropic's API."""
    return path.startswith("/v1/messages")


def error_body(path: str, status: int, message: str, code: str, field: str | None = None) -> dict[str, Any]:
    """OpenAI's shape, or Anthropic's on its routes."""
    if speaks_anthropic(path):
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": field}}


def body_of(path: str, error: BaseException) -> dict[str, Any]:
    """The body that tells of an error; what was not raised on purpose is not told."""
    if not isinstance(error, PalestraError):
        return error_body(path, 500, INTERNAL, "internal_error")
    field = error.field if isinstance(error, InvalidRequest) else None
    return error_body(path, error.http_status, str(error), error.code, field)


def headers_of(error: PalestraError) -> dict[str, str]:
    """Whether, and when, to try again."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if isinstance(error, TooManyRequests):
        headers["retry-after"] = f"{max(1, round(error.retry_after_seconds))}"
    return headers
