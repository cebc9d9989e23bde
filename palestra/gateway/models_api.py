"""Route `/v1/models`: the policies of a job, in the form in which OpenAI's clients list models."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request

from palestra.gateway.state import DataPlane
from palestra.http.guard import bearer


class ModelInfo(BaseModel):
    """One policy, in OpenAI's form of a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "palestra"


class ModelList(BaseModel):
    """The answer to `GET /v1/models`: the policies of the job, in OpenAI's form of a list."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


def add_models_route(app: FastAPI, plane: DataPlane) -> None:
    """Add the route `/v1/models`, which lists a job's policies."""

    @app.get("/v1/models", tags=["model"])
    async def models(request: Request) -> ModelList:
        """List the policies of this job. Any key of the job or of one of its episodes opens this route."""
        plane.keys.check(bearer(request))
        created = int(plane.started_at)
        return ModelList(data=[ModelInfo(id=name, created=created) for name in plane.sessions.context.policies.names])
