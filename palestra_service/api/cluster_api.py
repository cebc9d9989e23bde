"""Routes for the cluster: machines, free resources, and draining."""

# Annotations are not deferred here: FastAPI could not resolve those that name `plane`, a local of the function.

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Annotated

from fastapi import Depends, FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request

from palestra.http.app import request_schema
from palestra.types.gpus import GpuReading
from palestra.types.states import JobState
from palestra_control.jobs import SHARES
from palestra_control.wire import BaseView, ClusterView, Drain, InUse, NodeView
from palestra_service.accounts.identity import Identity
from palestra_service.api.access import ControlPlane
from palestra_service.api.accounts_api import spent_body
from palestra_service.placement.fitting import NOTHING, RunningJob, added
from palestra_service.store.allowances import given_to
from palestra_service.store.changes import StateTimes, state_times
from palestra_service.store.decisions import is_draining

LIMITS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)  # seconds, of the histograms' buckets
_FAMILIES = {
    JobState.QUEUED: ("palestra_job_queue_seconds", "Time of jobs in the queue until they were started."),
    JobState.STARTING: ("palestra_job_start_seconds", "Time from the start of jobs until they were running."),
}


def add_metrics_routes(app: FastAPI, plane: ControlPlane) -> None:
    """Add `/metrics` to the application."""

    @app.get("/metrics", tags=["cluster"])
    async def metrics(by: Annotated[Identity, Depends(plane.member)]) -> Response:
        """Return queue and start times of all job starts by tenant, in Prometheus' text format.

        The operator gets all tenants, others their own.
        """
        tenant = None if by.is_operator else by.tenant
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Histograms(await plane.store.read(lambda c: state_times(c, tenant, LIMITS))))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class _Histograms(Collector):
    """One histogram of seconds for each state, with a series for each tenant."""

    def __init__(self, times: StateTimes) -> None:
        self._times = times

    def collect(self) -> list[HistogramMetricFamily]:
        """Return the histograms, as prometheus_client asks for them."""
        families = {
            state: HistogramMetricFamily(name, text, labels=["tenant"]) for state, (name, text) in _FAMILIES.items()
        }
        bounds = [*map(str, LIMITS), "+Inf"]
        for (tenant, state), (numbers, total) in sorted(self._times.items()):
            buckets = list(zip(bounds, accumulate(numbers), strict=True))
            families[state].add_metric([tenant], buckets, total)
        return list(families.values())


def add_cluster_routes(app: FastAPI, plane: ControlPlane) -> None:
    """Add the routes for the cluster to the application."""
    scheduler = plane.scheduler

    @app.get("/healthz", tags=["cluster"])
    async def healthz(response: Response) -> dict[str, str]:
        """Return, without a key, whether the server can do its work; 503 with the problem if it cannot."""
        if (problem := scheduler.problem) is None:
            return {"status": "ok"}
        response.status_code = 503
        return {"status": "failing", "problem": problem}

    @app.get("/cluster", tags=["cluster"])
    async def cluster(by: Annotated[Identity, Depends(plane.member)]) -> ClusterView:
        """Return the machines and free resources, without their jobs, and the quota of the caller's tenant."""
        held = list(scheduler.running.values())
        bases = scheduler.bases.running()
        nodes, gpus = [], await scheduler.gpu_use()
        for node in scheduler.nodes:
            cards = gpus.get(node.node_id, GpuReading())
            here = [job.held_on(node.node_id) for job in (*held, *(base.held for base in bases))]
            cpus, gpu_shares, memory = added(NOTHING, *here)
            nodes.append(
                NodeView(
                    **asdict(node),
                    free_cpus=node.cpus - cpus / SHARES,
                    free_gpus=node.gpus - gpu_shares / SHARES,
                    free_memory_gib=node.memory_gib - memory / 1024,
                    jobs=sum(any(place.node_id == node.node_id for _, place in job.places) for job in held),
                    gpu_use=list(cards.cards),
                    gpu_problem=cards.problem,
                )
            )
        queued = len(await plane.store.queue())
        quota = await scheduler.quota_of(by.tenant)
        spent = await plane.store.read(partial(given_to, tenant=by.tenant))
        return ClusterView(
            nodes=nodes,
            draining=await plane.store.read(is_draining),
            queued=queued,
            live=len(held),
            quota=quota,
            spent=spent_body(spent) if quota.has_budget else None,
            in_use=_in_use(job for job in held if job.tenant == by.tenant),
            bases=_bases(plane, by),
        )

    @app.post("/cluster/drain", tags=["cluster"], status_code=204, openapi_extra=request_schema(Drain))
    async def drain(request: Request, by: Annotated[Identity, Depends(plane.operator)]) -> None:
        """Stop starting jobs, persistently, so that the cluster becomes idle; or resume."""
        body = await plane.body(Drain, request)
        await plane.administration.drain(by, body.on)


def _bases(plane: ControlPlane, by: Identity) -> list[BaseView]:
    """Return the base servers visible to the caller: those with jobs of its tenant, or all for the operator."""
    servers, now = plane.scheduler.bases, plane.store.clock.now()
    known = {base.base_id: base for base in servers.running()}
    views = []
    for record, load in servers.records:
        base, jobs = known[record.base_id], servers.tenants_on(record.base_id)
        own = sum(tenant == by.tenant for tenant in jobs)
        if not own and not by.is_operator:
            continue
        views.append(
            BaseView(
                base_id=record.base_id,
                model=record.kind.model,
                deterministic=record.kind.deterministic,
                state=record.state.value,
                reason=record.reason,
                node=record.node,
                cpus=record.resources.cpus,
                gpus=record.resources.gpus,
                memory_gib=record.resources.memory_gib,
                starts=record.starts,
                idle_seconds=None if base.idle_since is None else max(now - base.idle_since, 0.0),
                jobs=len(jobs),
                own_jobs=own,
                adapters=base.adapters,
                waiting=load.waiting,
                longest_wait_seconds=load.longest_wait,
                tokens=load.tokens,
            )
        )
    return views


def _in_use(running: Iterable[RunningJob]) -> InUse:
    counts = [job.counts for job in running]
    cpus, gpus, memory = (sum(amounts) for amounts in zip(NOTHING, *counts, strict=True))
    return InUse(jobs=len(counts), cpus=cpus / SHARES, gpus=gpus / SHARES, memory_gib=memory / 1024)
