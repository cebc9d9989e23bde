"""The ASGI application of the control plane."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from palestra.gateway.equipment import ERRORS, equip
from palestra.scheduler.api.access import ControlPlane
from palestra.scheduler.api.accounts_api import add_account_routes, add_key_routes
from palestra.scheduler.api.cluster_api import add_cluster_routes
from palestra.scheduler.api.jobs_api import add_job_routes, add_reading_routes

MAX_BODY_BYTES = 4 * 2**20
PUBLIC = ("/healthz", "/openapi.json")  # without a key

__all__ = ["PUBLIC", "ControlPlane", "create_control_app"]


def create_control_app(plane: ControlPlane) -> FastAPI:
    """All routes of the control plane."""
    app = FastAPI(
        title="Palestra control plane",
        version=version("palestra"),
        description="Submit jobs, watch them, and say who may.",
        responses=ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    add_job_routes(app, plane)
    add_reading_routes(app, plane)
    add_account_routes(app, plane)
    add_key_routes(app, plane)
    add_cluster_routes(app, plane)
    equip(app, MAX_BODY_BYTES)
    return app
