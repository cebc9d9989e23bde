"""The cluster: machines, what is free, and whether jobs may start."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.requests import Request

from palestra.http.openapi import request_schema
from palestra.scheduler.api.access import ControlPlane
from palestra.scheduler.fitting import RunningJob
from palestra.scheduler.identity import Identity
from palestra.scheduler.permissions import Action
from palestra.scheduler.policy_store import is_draining
from palestra.schemas.control_wire import ClusterView, Drain, InUse, NodeView, QuotaBody


def add_cluster_routes(app: FastAPI, plane: ControlPlane) -> None:
    """All of them."""
    scheduler = plane.scheduler

    @app.get("/healthz", tags=["cluster"])
    async def healthz() -> dict[str, str]:
        """Answers, without a key, when requests are taken."""
        return {"status": "ok"}

    @app.get("/cluster", tags=["cluster"])
    async def cluster(by: Annotated[Identity, Depends(plane.may(Action.CLUSTER_READ))]) -> ClusterView:
        """Machines, and what is free; nothing about whose jobs run there. And the tenant's own quota."""
        held = list(scheduler.running.values())
        nodes = []
        for node in scheduler.nodes:
            here = [job for job in held if job.node_id == node.node_id]
            nodes.append(
                NodeView(
                    node_id=node.node_id,
                    alive=node.alive,
                    draining=node.draining,
                    cpus=node.cpus,
                    gpus=node.gpus,
                    memory_gib=node.memory_gib,
                    free_cpus=node.cpus - sum(job.needs.cpus for job in here),
                    free_gpus=node.gpus - sum(job.needs.gpus for job in here),
                    jobs=len(here),
                )
            )
        queued = len(await plane.store.queue())
        return ClusterView(
            nodes=nodes,
            draining=await plane.store.read(is_draining),
            queued=queued,
            live=len(held),
            quota=QuotaBody.model_validate(asdict(await scheduler.quota_of(by.tenant))),
            in_use=_in_use(job for job in held if job.tenant == by.tenant),
        )

    @app.post("/cluster/drain", tags=["cluster"], status_code=204, openapi_extra=request_schema(Drain))
    async def drain(request: Request, by: Annotated[Identity, Depends(plane.may(Action.CLUSTER_DRAIN))]) -> None:
        """Start nothing more, so that the cluster runs empty, also after a restart; or go on."""
        body = await plane.body(Drain, request)
        await plane.administration.drain(by, body.on)


def _in_use(running: Iterable[RunningJob]) -> InUse:
    held = list(running)
    return InUse(
        jobs=len(held),
        cpus=sum(job.needs.cpus for job in held),
        gpus=sum(job.needs.gpus for job in held),
        memory_gib=sum(job.needs.memory_gib for job in held),
    )
