"""What the application of either server begins with: every request needs a key, and every error is answered."""

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
        authenticate: called for each request before anything of its body is read; raises what is wrong with its key.
        max_body_bytes: the most that any body may have, in bytes.
        public: paths that are answered without a key.
        error_forms: by what a path begins with, the form of its errors. Other paths have OpenAI's form.
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
