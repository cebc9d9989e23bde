"""Routes that are in FastAPI's document, and are answered without FastAPI's work for each request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response

Endpoint = Callable[[Request], Awaitable[Response | BaseModel]]


class BareRoute(APIRoute):
    """A route whose endpoint gets the raw request, reads its body itself, and returns an answer or a model of one.

    FastAPI would open two exit stacks for dependencies, which do not exist, and validate the model once more.
    """

    def __init__(self, path: str, endpoint: Endpoint, **settings: Any) -> None:
        """Create the route; arguments as in `APIRoute`."""
        super().__init__(path, endpoint, **settings)
        self.app = request_response(_written(endpoint))


def _written(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that writes its models as JSON."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        found = await endpoint(request)
        if isinstance(found, Response):
            return found
        return Response(found.model_dump_json(by_alias=True), media_type="application/json")

    return answer
