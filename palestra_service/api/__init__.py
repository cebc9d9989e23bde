"""The HTTP API of the control plane, as an ASGI application."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import FastAPI
from starlette.requests import Request

from palestra.http import app as http_app
from palestra_service.api.access import ControlPlane
from palestra_service.api.accounts_api import add_account_routes, add_key_routes
from palestra_service.api.cluster_api import add_cluster_routes, add_metrics_routes
from palestra_service.api.jobs_api import add_job_routes, add_reading_routes

MAX_BODY_BYTES = 4 * 2**20
PUBLIC = ("/healthz", *http_app.PUBLIC)  # paths that are answered without a key

__all__ = ["PUBLIC", "ControlPlane", "create_control_app"]


def create_control_app(plane: ControlPlane, public: Collection[str] = PUBLIC) -> FastAPI:
    """Return the application with all routes of the control plane."""

    async def authenticate(request: Request) -> int:
        return (await plane.who(request)).limits.body_bytes

    app = http_app.build_app(
        "Palestra control plane", "Submit jobs, watch them, and say who may.", authenticate, MAX_BODY_BYTES, public
    )
    add_job_routes(app, plane)
    add_reading_routes(app, plane)
    add_account_routes(app, plane)
    add_key_routes(app, plane)
    add_cluster_routes(app, plane)
    add_metrics_routes(app, plane)
    return app
