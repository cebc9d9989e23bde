"""`/v1/models`: the policies of a job, as OpenAI's clients list them."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request

from palestra.gateway.state import DataPlane
from palestra.http.guard import bearer


class ModelInfo(BaseModel):
    """One policy."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "palestra"


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


def add_models_route(app: FastAPI, plane: DataPlane) -> None:
    """Add the route that lists a job's policies."""

    @app.get("/v1/models", tags=["model"])
    async def models(request: Request) -> ModelList:
        """The policies of this job. Any key of it will do."""
        plane.keys.check(bearer(request))
        created = int(plane.started_at)
        return ModelList(data=[ModelInfo(id=name, created=created) for name in plane.sessions.context.policies])
