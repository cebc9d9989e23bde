"""Registers routes about episodes and player slots, which jobs without episodes refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeAlias

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import Conflict
from palestra.http.app import GuardedApp
from palestra.http.guard import Endpoint
from palestra.server.state import DataPlane

Route: TypeAlias = Callable[[str, type[BaseModel] | None], Callable[[Endpoint], Endpoint]]


def episode_routes(app: GuardedApp, plane: DataPlane, tag: str) -> Route:
    """Return a maker of decorators that add endpoints about episodes under one heading of the OpenAPI document.

    An endpoint with a body, which it reads itself, answers POST, another one GET. A job that serves a model answers all
    of them with 409.
    """

    def route(path: str, body: type[BaseModel] | None) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            answer = endpoint if plane.config.kind == "training" else _refused(endpoint)
            if body is None:
                app.router.add_api_route(path, answer, methods=["GET"], tags=[tag])
            else:
                app.add_direct(path, answer, body, tags=[tag])
            return endpoint

        return add

    return route


def _refused(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint in place of one about episodes, in a job that has none."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response | BaseModel:
        raise Conflict(
            "this job serves a model and has no episodes; call /v1/chat/completions, or another dialect, with its key"
        )

    return answer
