"""The ASGI application of a data plane."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request

from palestra.gateway.chat_api import add_chat_routes
from palestra.gateway.completions_api import add_completions_route
from palestra.gateway.episode_api import add_episode_routes
from palestra.gateway.messages_answers import anthropic_error
from palestra.gateway.messages_api import add_messages_route
from palestra.gateway.plane import DataPlane
from palestra.gateway.responses_api import add_responses_route
from palestra.gateway.status_api import add_status_routes
from palestra.http.app import build_app
from palestra.http.guard import bearer
from palestra.http.openapi import describe

__all__ = ["DataPlane", "create_app"]


def create_app(plane: DataPlane) -> FastAPI:
    """All routes of one job's data plane."""
    most = plane.config.server.max_body_bytes

    async def authenticate(request: Request) -> int:
        plane.keys.check(bearer(request))
        return most

    app = build_app(
        "Palestra data plane",
        "Claim episodes, call the model, hand in rewards.",
        authenticate,
        most,
        error_forms={"/v1/messages": anthropic_error},
    )
    add_chat_routes(app, plane)
    add_completions_route(app, plane)
    add_responses_route(app, plane)
    add_messages_route(app, plane)
    add_episode_routes(app, plane)
    add_status_routes(app, plane)
    describe(app)
    return app
