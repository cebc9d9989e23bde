"""The route for Prometheus: how long jobs wait in the queue and how long they take to start."""

from itertools import accumulate
from typing import Annotated

from fastapi import Depends, FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from palestra.types.states import JobState
from palestra_service.accounts.identity import Identity
from palestra_service.api.access import ControlPlane
from palestra_service.rights.permissions import Action
from palestra_service.store.changes import StateTimes, state_times

LIMITS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)  # seconds, of the histograms' buckets
_FAMILIES = {
    JobState.QUEUED: ("palestra_job_queue_seconds", "Time of jobs in the queue until they were started."),
    JobState.STARTING: ("palestra_job_start_seconds", "Time from the start of jobs until they were running."),
}


def add_metrics_routes(app: FastAPI, plane: ControlPlane) -> None:
    """Add `/metrics` to the application."""

    @app.get("/metrics", tags=["cluster"])
    async def metrics(by: Annotated[Identity, Depends(plane.may(Action.CLUSTER_READ))]) -> Response:
        """Return queue and start times of all job starts by tenant, in Prometheus' text format.

        The operator gets all tenants, others their own.
        """
        tenant = None if by.may(Action.CLUSTER_DRAIN) else by.tenant
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
