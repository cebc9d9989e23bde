"""The route that changes the number of a running job's inference workers."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request

from palestra.engine.base import WorkerPool
from palestra.errors import Conflict, InvalidRequest
from palestra.http.protocol import until_disconnect
from palestra.server import DataPlane
from palestra.server.auth import require_job
from palestra.types.wire import Body


class Replicas(Body):
    """The body of `POST /engine/replicas`, and its answer."""

    replicas: int = Field(strict=True, ge=1, le=64, description="Inference workers.")


def add_scaling_route(app: FastAPI, plane: DataPlane, pool: WorkerPool | None, most: int | None) -> None:
    """Add the route that changes the number of inference workers.

    Args:
        pool: the job's engine; None: it has no workers.
        most: limit; None: any number.
    """

    @app.post("/engine/replicas", tags=["model"])
    async def resize(request: Request, wanted: Replicas) -> Replicas:
        """Change the number of inference workers, and answer when it is reached.

        New workers first load the model and take the present weights. Removed workers finish their calls first, even if
        the client disconnects. The job's key is required. The change lasts until the job ends.
        """
        require_job(request)
        if most is not None and wanted.replicas > most:
            raise InvalidRequest(
                f"replicas is {wanted.replicas}, and this job was admitted with {most}; submit it with more "
                "(engine.replicas)",
                "replicas",
            )
        if pool is None:
            raise Conflict("this job's engine is in its own process; start it with engine.replicas = 2 or more")
        await until_disconnect(request.scope, pool.resize(wanted.replicas))
        return wanted
