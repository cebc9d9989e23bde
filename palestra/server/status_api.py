"""Status, models, events and metrics of a job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import orjson
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from palestra.errors import InvalidRequest, Unauthorized
from palestra.http import sse
from palestra.http.sse import AS_IT_COMES, MEDIA_TYPE, News, encode_event
from palestra.server.auth import require_job
from palestra.server.state import DataPlane
from palestra.threads import in_thread
from palestra.types.gpus import GpuReading
from palestra.types.progress import Counts
from palestra.types.records import RunEvent
from palestra.types.wire import EngineWorker, JobStatus

HOLDERS = 20  # the most held episodes that `/status` lists


class ModelInfo(BaseModel):
    """One policy, in OpenAI's model format."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "palestra"


class ModelList(BaseModel):
    """The answer to `GET /v1/models`: the policies of the job, in OpenAI's list format."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


def add_models_route(app: FastAPI, plane: DataPlane) -> None:
    """Add the route `/v1/models`, which lists a job's policies."""

    @app.get("/v1/models", tags=["model"])
    async def models() -> ModelList:
        """List the policies of this job. Any key of the job or of one of its episodes opens this route."""
        created = int(plane.started_at)
        return ModelList(data=[ModelInfo(id=name, created=created) for name in plane.sessions.context.policies.names])


def add_status_routes(app: FastAPI, plane: DataPlane) -> None:
    """Add the routes for monitoring a job: `/status`, `/events` and `/metrics`."""

    @app.get("/status", tags=["status"])
    async def status(request: Request) -> JobStatus:
        """Return the job's progress: its state, phase and step, episodes, workers and newest metrics."""
        require_job(request)
        progress, counts = plane.progress, await plane.store.episodes.counts()
        return JobStatus(
            **plane.brief_status(await in_thread(plane.gpus)),
            job=progress.job,
            kind=plane.config.kind,
            steps=progress.steps,
            version=progress.version,
            versions={name: str(version) for name, version in plane.sessions.context.policies.versions.items()},
            episodes=_episodes(counts),
            held_by=plane.store.leases.holders(HOLDERS),
            runners=progress.runners,
            engine_workers=[
                EngineWorker(**asdict(worker))
                for load in plane.sessions.context.policies.engine_loads
                for worker in load.workers
            ],
            calls={"in_flight": plane.sessions.in_flight, **plane.sessions.context.counts},
            turn_seconds={state.value: spent for state, spent in plane.sessions.context.times.seconds.items()},
            rollouts={"playing": progress.rollouts.playing, **progress.rollouts.terminations},
            recent_reward=(recent := plane.recent_rewards).get(""),
            recent_rewards={policy: reward for policy, reward in recent.items() if policy},
            staleness=progress.staleness,
            warnings=progress.warnings,
            last_metrics=progress.last_metrics,
            run_dir=progress.run_dir,
            numerics=progress.numerics,
        )

    @app.get("/events", tags=["status"])
    async def events(request: Request, after: int = 0, follow: bool = True) -> StreamingResponse:
        """Stream server-sent events: all after number `after` (or the header `Last-Event-ID`), then new ones."""
        require_job(request)
        last = request.headers.get("last-event-id", str(after))
        if not (last.isascii() and last.isdigit() and len(last) < 19):
            raise InvalidRequest(f"Last-Event-ID is {last!r}; it is the number of an event", "last-event-id")
        look = _events_after(plane, request, int(last))
        return StreamingResponse(sse.follow(look, follow, partial(_pause, plane)), 200, AS_IT_COMES, MEDIA_TYPE)

    @app.get("/metrics", tags=["status"])
    async def metrics(request: Request) -> Response:
        """Return the job's status and newest metrics in Prometheus' text format."""
        require_job(request)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(plane, await plane.store.episodes.counts(), await in_thread(plane.gpus)))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


def _episodes(counts: Counts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in Counts.__slots__}


def _events_after(plane: DataPlane, request: Request, last: int) -> Callable[[], Awaitable[News | None]]:
    """Return a function that returns events after number `last`, or None once the request's key is invalid."""

    async def look() -> News | None:
        nonlocal last
        try:
            plane.keys.recheck(request)
        except Unauthorized:
            return None
        over = plane.progress.over or plane.stopping.is_set()  # before the query, so that the last event is not missed
        found = await plane.store.log.events(last)
        last = found[-1].event_id if found else last
        return News([_encoded(event) for event in found], over)

    return look


def _encoded(event: RunEvent) -> bytes:
    data = orjson.dumps({"at": event.at, "kind": event.kind, **event.data})
    return encode_event(data, event.kind, str(event.event_id))


async def _pause(plane: DataPlane, seconds: float) -> None:
    """Return after `seconds`, or as soon as the server stops."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await plane.stopping.wait()


def _family(
    name: str,
    text: str,
    values: float | Mapping[Any, float | None],
    *labels: str,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """Return a metric of Prometheus: one number, or several by tuples of the values of its labels; None is left out."""
    if not isinstance(values, Mapping):
        return kind(name, text, value=values)
    found = kind(name, text, labels=labels)
    for key, value in values.items():
        if value is not None:
            found.add_metric(key, value)
    return found


def _by_name(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): value for name, value in values.items()}


def _of_engines(plane: DataPlane) -> Iterator[Metric]:
    """Yield metrics of the engines of all policies."""
    policies = plane.sessions.context.policies
    loads = policies.engine_loads
    requests = {"waiting": sum(load.waiting for load in loads), "running": sum(load.running for load in loads)}
    yield _family("palestra_engine_requests", "Requests of the engines by state.", _by_name(requests), "state")
    tokens = {
        "prefilled": sum(load.prefilled_tokens for load in loads),
        "sampled": sum(load.sampled_tokens for load in loads),
    }
    text = "Tokens that the engines have computed."
    yield _family("palestra_engine_tokens", text, _by_name(tokens), "what", kind=CounterMetricFamily)
    text = "Keys and values that running requests have reserved, or that are kept for prompts to come."
    yield _family("palestra_engine_kv_used_bytes", text, sum(load.kv_bytes_used for load in loads))
    yield _family("palestra_engine_kv_bytes", "The most that they may be.", sum(load.kv_bytes for load in loads))
    versions = {name: version.n for name, version in policies.versions.items()}
    text = "n of the version that each policy is sampled from."
    yield _family("palestra_policy_version", text, _by_name(versions), "policy")
    if workers := [worker for load in loads for worker in load.workers]:
        states = {(worker.name, worker.state): 1 for worker in workers}
        text = "Inference workers: 1 for the state of each."
        yield _family("palestra_engine_worker_state", text, states, "worker", "state")
        busy = {worker.name: worker.requests for worker in workers}
        text = "Requests that each inference worker answers."
        yield _family("palestra_engine_worker_requests", text, _by_name(busy), "worker")
        restarts = {worker.name: worker.restarts for worker in workers}
        text = "How often inference workers had to be replaced."
        yield _family("palestra_engine_worker_restarts", text, _by_name(restarts), "worker", kind=CounterMetricFamily)


def _of_gpus(gpus: GpuReading) -> Iterator[Metric]:
    """Yield metrics of the graphics cards that the job may use; a figure that a card has not is left out."""
    if cards := {str(card.index): card for card in gpus.cards}:
        text = "Part of the driver's last sample in which a graphics card computed something, 0 to 1."
        yield _family("palestra_gpu_utilisation", text, {(n,): card.utilisation for n, card in cards.items()}, "gpu")
        memory: dict[tuple[str, ...], float | None] = {}
        for name, card in cards.items():
            memory |= {(name, "used"): card.memory_used_bytes, (name, "all"): card.memory_bytes}
        yield _family("palestra_gpu_memory_bytes", "Memory of the cards.", memory, "gpu", "what")
        watts = {(name,): card.power_watts for name, card in cards.items()}
        yield _family("palestra_gpu_power_watts", "Power that the cards draw.", watts, "gpu")
        celsius = {(name,): card.temperature_celsius for name, card in cards.items()}
        yield _family("palestra_gpu_temperature_celsius", "Temperature of the cards.", celsius, "gpu")


class _Collector(Collector):
    """Counters and gauges for Prometheus, read at the time of the request."""

    def __init__(self, plane: DataPlane, counts: Counts, gpus: GpuReading) -> None:
        self._plane, self._counts, self._gpus = plane, counts, gpus

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks for them."""
        plane, counter, context = self._plane, CounterMetricFamily, self._plane.sessions.context
        yield _family("palestra_episodes", "Episodes by state.", _by_name(_episodes(self._counts)), "state")
        seconds = {state.value: spent for state, spent in context.times.seconds.items()}
        yield _family("palestra_turn_seconds", "Time of calls by state.", _by_name(seconds), "state", kind=counter)
        text = "What became of model calls, and their tokens."
        yield _family("palestra_calls", text, _by_name(context.counts), "what", kind=counter)
        happened, text = _by_name(plane.connections.counts), "What happened to connections."
        yield _family("palestra_connection_events", text, happened, "what", kind=counter)
        latest = _by_name(plane.progress.last_metrics)
        yield _family("palestra_metric", "The newest row of metrics.jsonl.", latest, "name")
        yield _family("palestra_connections", "Connections that are open.", len(plane.connections))
        yield _family("palestra_step", "Steps that are done.", plane.progress.step)
        text = "Of the calls that ended in the last ten seconds."
        yield _family("palestra_tokens_per_second", text, context.rate.per_second)
        yield _family("palestra_calls_in_flight", "Model calls in flight.", plane.sessions.in_flight)
        yield from _of_engines(plane)
        yield from _of_gpus(self._gpus)
