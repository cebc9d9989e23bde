"""The base of both servers' applications: every request needs a key, and every error is answered.

Bodies read by routes themselves are described in the OpenAPI document like FastAPI's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from palestra import __version__
from palestra.http.errors import ErrorAnswers, ErrorForm
from palestra.http.guard import Authenticate, Endpoint, OnRefused, RequestGuard
from palestra.pictures.blobs import Blobs
from palestra.pictures.containers import MEDIA_TYPES, media_type_of
from palestra.types.wire import ErrorAnswer

PUBLIC = ("/openapi.json",)  # answered without a key
_MODELS = "#/components/schemas/{model}"
# As a reference: of a model FastAPI would make a validator for each of these codes of each route, which is most of the
# time in which an application is made.
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"content": {"application/json": {"schema": {"$ref": _MODELS.format(model=ErrorAnswer.__name__)}}}}
    for code in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


def request_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that a route reads itself, for FastAPI's `openapi_extra`."""
    schema = kind.model_json_schema(ref_template=_MODELS)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add(schema: dict[str, Any], known: dict[str, Any]) -> str:
    """Add a schema and its definitions to the known ones, and return the reference to it."""
    whole = dict(schema)
    for name, definition in (whole.pop("$defs", {}) | {schema["title"]: whole}).items():
        if known.setdefault(name, definition) != definition:
            raise ValueError(f"two models are called {name}")
    return _MODELS.format(model=schema["title"])


def _describe(app: FastAPI) -> None:
    """Make the application's OpenAPI document contain each model once, under its name."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        known = document.setdefault("components", {}).setdefault("schemas", {})
        _add(ErrorAnswer.model_json_schema(ref_template=_MODELS), known)
        for methods in document["paths"].values():
            for route in methods.values():
                content = route.get("requestBody", {}).get("content", {}).get("application/json")
                if content is not None and "$ref" not in content["schema"]:
                    content["schema"] = {"$ref": _add(content["schema"], known)}
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's guide replaces the method in this way


class GuardedApp(FastAPI):
    """An application that answers some of its routes directly: `post` requests that FastAPI only describes."""

    def __init__(self, guard: RequestGuard, **settings: Any) -> None:
        super().__init__(**settings)
        self.guard = guard
        self._direct: dict[str, tuple[Endpoint, bool]] = {}  # by path; see `RequestGuard.answer`
        self.add_middleware(lambda app: partial(guard.pass_on, app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (called by the server)."""
        direct = self._direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if direct is None:
            await super().__call__(scope, receive, send)
        else:
            await self.guard.answer(*direct, scope, receive, send)

    def add_direct(
        self, path: str, endpoint: Endpoint, body: type[BaseModel], cancels: bool = False, **description: Any
    ) -> None:
        """Add a route for POST that `RequestGuard` calls itself.

        Args:
            endpoint: gets the request with its body, which it parses, and returns an answer or a model of one.
            body: model of its bodies, for the document.
            cancels: whether it is cancelled when the client disconnects.
            description: for the document; see `FastAPI.add_api_route`.
        """
        self._direct[path] = endpoint, cancels
        self.router.add_api_route(path, endpoint, methods=["POST"], openapi_extra=request_schema(body), **description)


def build_app(
    title: str,
    description: str,
    authenticate: Authenticate,
    max_body_bytes: int,
    public: Collection[str] = PUBLIC,
    error_forms: Mapping[str, ErrorForm] | None = None,
    on_refused: OnRefused | None = None,
) -> GuardedApp:
    """Return an application without routes that answers errors and requires a key for every request.

    Args:
        authenticate: called for each request before its body is read; raises if the key is missing or unknown.
        public: paths that need no key.
        error_forms: form of errors by path prefix; others have OpenAI's form.
        on_refused: called before a refused request of a direct route is answered.
    """
    answers = ErrorAnswers(error_forms or {})
    app = GuardedApp(
        RequestGuard(authenticate, max_body_bytes, public, answers, on_refused),
        title=title,
        version=__version__,
        description=description,
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    answers.install(app)
    _describe(app)
    return app


SHOWN: dict[int | str, dict[str, Any]] = {200: {"content": {kind: {} for kind in MEDIA_TYPES}}}  # for OpenAPI


def picture_answer(blobs: Blobs, digest: str) -> Response:
    """Return the response with a stored picture. Blocks for the disk.

    The type is read from the bytes, not from a client's claim.
    """
    return file_answer(blobs.get(digest))


def file_answer(data: bytes, **headers: str) -> Response:
    """Return the response with a picture file, and further headers."""
    safe = {
        "x-content-type-options": "nosniff",
        "content-security-policy": "default-src 'none'; sandbox",
        "cache-control": "no-store",  # as all answers that need a key
    }
    return Response(data, media_type=media_type_of(data), headers=safe | headers)
