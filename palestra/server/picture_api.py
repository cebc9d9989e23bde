"""The routes of pictures: upload one under its digest, and get the stored bytes back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import InvalidRequest
from palestra.http.app import SHOWN, picture_answer
from palestra.http.protocol import until_disconnect
from palestra.pictures.blobs import picture_digest
from palestra.pictures.containers import MEDIA_TYPES
from palestra.server.auth import caller_of, require_job
from palestra.server.state import DataPlane
from palestra.types.wire import PictureKept

_FILE: dict[str, Any] = {"type": "string", "format": "binary"}


def add_picture_routes(app: FastAPI, plane: DataPlane) -> None:
    """Add the routes of pictures."""
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
