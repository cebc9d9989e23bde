"""The web application of a data plane: its routes, and the check of a key before any body is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fastapi import FastAPI

from palestra.http.app import PUBLIC, build_app
from palestra.server.auth import Door
from palestra.server.dialects import DIALECTS, Dialect
from palestra.server.episode_api import add_episode_routes
from palestra.server.generate import add_dialect_routes
from palestra.server.picture_api import add_picture_routes
from palestra.server.seat_api import add_seat_routes
from palestra.server.state import DataPlane
from palestra.server.status_api import add_models_route, add_status_routes


def create_app(
    plane: DataPlane,
    dialects: Sequence[Dialect[Any]] = DIALECTS,
    public: Collection[str] = PUBLIC,
    page: str | None = None,
) -> FastAPI:
    """Return the application of one job's data plane.

    Args:
        dialects: the wire formats for model calls.
        public: paths that need no key.
        page: prefix of paths that the viewer's key opens too, if any.
    """
    most, largest_picture = plane.config.server.max_body_bytes, plane.config.pictures.max_bytes
    app = build_app(
        "Palestra data plane",
        "Claim episodes, call the model, hand in rewards.",
        Door(plane.keys, most, largest_picture, page).admit,
        max(most, largest_picture),
        public,
        error_forms={dialect.path: dialect.error_body for dialect in dialects},
        on_refused=plane.count_refusal,
    )
    add_dialect_routes(app, plane, dialects)
    add_models_route(app, plane)
    add_episode_routes(app, plane)
    add_picture_routes(app, plane)
    add_seat_routes(app, plane)
    add_status_routes(app, plane)
    return app
