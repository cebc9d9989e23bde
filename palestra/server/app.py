"""The web application of a data plane: its routes, and the check of a key before any body is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import InvalidRequest
from palestra.http.app import PUBLIC, SHOWN, GuardedApp, build_app, picture_answer
from palestra.http.protocol import until_disconnect
from palestra.pictures.blobs import picture_digest
from palestra.pictures.containers import MEDIA_TYPES
from palestra.server.auth import Door, caller_of, require_job
from palestra.server.dialects import DIALECTS, Dialect
from palestra.server.episode_api import add_episode_routes
from palestra.server.generate import add_dialect_routes, model_paths
from palestra.server.seat_api import add_seat_routes
from palestra.server.state import DataPlane
from palestra.server.status_api import add_models_route, add_status_routes
from palestra.types.wire import PictureKept

_FILE: dict[str, Any] = {"type": "string", "format": "binary"}


def create_app(
    plane: DataPlane,
    dialects: Sequence[Dialect[Any]] = DIALECTS,
    public: Collection[str] = PUBLIC,
    page: str | None = None,
) -> GuardedApp:
    """Return the application of one job's data plane.

    Args:
        dialects: the wire formats for model calls.
        public: paths that need no key.
        page: prefix of paths that the viewer's key opens too, if any.
    """
    most = plane.config.server.max_body_bytes
    app = build_app(
        "Palestra data plane",
        "Claim episodes, call the model, hand in rewards.",
        Door(plane.keys, plane.config.kind, model_paths(dialects), most, page).admit,
        most,
        public,
        error_forms={dialect.path: dialect.error_body for dialect in dialects},
        on_refused=plane.count_refusal,
    )
    add_dialect_routes(app, plane, dialects)
    add_models_route(app, plane)
    add_episode_routes(app, plane)
    _add_picture_routes(app, plane)
    add_seat_routes(app, plane)
    add_status_routes(app, plane)
    return app


def _add_picture_routes(app: FastAPI, plane: DataPlane) -> None:
    """Add the routes of pictures: upload one under its digest, and get the stored bytes back."""
    routes = APIRouter(tags=["pictures"])

    @routes.put(
        "/pictures/{digest}",
        openapi_extra={"requestBody": {"required": True, "content": {kind: {"schema": _FILE} for kind in MEDIA_TYPES}}},
    )
    async def upload_picture(digest: str, request: Request) -> PictureKept:
        """Store a picture under its digest, for use in messages. Repeating the upload changes nothing.

        The body is the file: PNG, JPEG, WebP or GIF, with one frame. Any key of the job or of one of its episodes opens
        this route.
        """
        data = await request.body()
        if picture_digest(data) != digest:
            raise InvalidRequest("the digest in the path is not the SHA-256 of the body", "digest")
        keeping = plane.pictures.keep(data, charge=plane.picture_charge(caller_of(request)))
        return PictureKept(digest=await until_disconnect(request.scope, keeping))

    @routes.get("/pictures/{digest}", response_class=Response, responses=SHOWN)
    async def show_picture(digest: str, request: Request) -> Response:
        """Return the file of a picture, exactly as it was sent, with the type that its bytes have."""
        require_job(request)
        return await plane.pool.run(picture_answer, plane.store.pictures, digest)

    app.include_router(routes)
