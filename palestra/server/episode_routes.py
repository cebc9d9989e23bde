"""Registers routes about episodes and player slots, which jobs without episodes refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from palestra.http.app import request_schema
from palestra.http.bare_route import BareRoute, Endpoint
from palestra.server.auth import refuse_episodes
from palestra.server.state import DataPlane


class EpisodeRoutes:
    """Adds routes under one heading of the OpenAPI document; a job that serves a model answers all of them with 409."""

    def __init__(self, app: FastAPI, plane: DataPlane, tag: str) -> None:
        """Create the object.

        Args:
            plane: has the job's kind and keys.
            tag: the heading.
        """
        self._app, self._plane, self._tag = app, plane, tag

    def get(self, path: str) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds an endpoint for requests without a body."""
        return self._adder(path, "GET", None)

    def post(self, path: str, body: type[BaseModel]) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds an endpoint, which reads a body of this type itself."""
        return self._adder(path, "POST", body)

    def _adder(self, path: str, method: str, body: type[BaseModel] | None) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            @wraps(endpoint)
            async def answer(request: Request) -> Response | BaseModel:
                refuse_episodes(self._plane.config.kind, self._plane.keys, request)
                return await endpoint(request)

            self._app.router.add_api_route(
                path,
                answer,
                methods=[method],
                tags=[self._tag],
                openapi_extra=None if body is None else request_schema(body),
                route_class_override=BareRoute,
            )
            return endpoint

        return add
