"""The answer that shows a stored picture: its exact bytes, as one of four types that hold no script."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from palestra.pictures.blobs import Blobs
from palestra.pictures.containers import MEDIA_TYPES, media_type_of

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
