"""The FastAPI application of either server: every request needs a key, and every error becomes an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from palestra.http.errors import ErrorAnswers, ErrorForm
from palestra.http.guard import Authenticate, RequestGuard
from palestra.schemas.wire import ErrorAnswer

PUBLIC = ("/openapi.json",)  # answered without a key
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer} for code in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


def build_app(
    title: str,
    description: str,
    authenticate: Authenticate,
    max_body_bytes: int,
    public: Collection[str] = PUBLIC,
    error_forms: Mapping[str, ErrorForm] | None = None,
) -> FastAPI:
    """Return an application without routes, in which errors become answers and every request needs a key.

    Args:
        title: of the OpenAPI document.
        description: of the OpenAPI document.
        authenticate: called for each request before its body is read; raises if the key is missing or unknown.
        max_body_bytes: the longest body of any request, in bytes.
        public: paths that are answered without a key.
        error_forms: for paths with these beginnings, the form of their errors. Other paths have OpenAI's form.
    """
    app = FastAPI(
        title=title,
        version=version("palestra"),
        description=description,
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    answers = ErrorAnswers(error_forms or {})
    answers.install(app)
    app.add_middleware(
        RequestGuard, authenticate=authenticate, max_bytes=max_body_bytes, public=public, answers=answers
    )
    return app
