"""Registers routes about episodes and player slots, which jobs without episodes refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import Conflict
from palestra.http.app import GuardedApp
from palestra.http.guard import Endpoint
from palestra.server.state import DataPlane


class EpisodeRoutes:
    """Adds routes under one heading of the OpenAPI document; a job that serves a model answers all of them with 409."""

    def __init__(self, app: GuardedApp, plane: DataPlane, tag: str) -> None:
        """Create the object.

        Args:
            plane: has the job's kind and keys.
        """
        self._app, self._plane, self._tag = app, plane, tag

    def get(self, path: str) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds an endpoint for requests without a body."""
        return self._adder(path, None)

    def post(self, path: str, body: type[BaseModel]) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds an endpoint, which reads a body of this type itself."""
        return self._adder(path, body)

    def _adder(self, path: str, body: type[BaseModel] | None) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            answer = endpoint if self._plane.config.kind == "training" else _refused(endpoint)
            if body is None:
                self._app.router.add_api_route(path, answer, methods=["GET"], tags=[self._tag])
            else:
                self._app.add_direct(path, answer, body, tags=[self._tag])
            return endpoint

        return add


def _refused(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint in place of one about episodes, in a job that has none."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response | BaseModel:
        raise Conflict(
            "this job serves a model and has no episodes; call /v1/chat/completions, or another dialect, with its key"
        )

    return answer
