"""The page of a job in this process: its run, and live data of the process."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request

from palestra.dashboard.answers import LiveState
from palestra.dashboard.files import PAGE, public_paths
from palestra.dashboard.routes import add_page
from palestra.dashboard.runs import Run
from palestra.dashboard.token_text import TokenText
from palestra.engine.base import WorkerPool
from palestra.http.app import PUBLIC
from palestra.runtime.playground import PlaygroundCheckpoints, add_checkpoint_route
from palestra.runtime.scaling import add_scaling_route
from palestra.server import DataPlane, create_app
from palestra.server.auth import JobKey, caller_of


def create_job_app(plane: DataPlane, pool: WorkerPool | None = None, most_replicas: int | None = None) -> FastAPI:
    """Return the application of a job: its data plane and its page."""
    app = create_app(plane, public={*PUBLIC, *public_paths()}, page=f"{PAGE}/")
    folder = Path(plane.progress.run_dir)
    checkpoints = PlaygroundCheckpoints(plane.config, folder, plane.sessions.context.policies)
    add_checkpoint_route(app, plane, checkpoints)
    add_scaling_route(app, plane, pool, most_replicas)
    run = Run(
        name=plane.config.name,
        folder=folder,
        live=lambda: _live(plane, checkpoints),
        given=plane.config,
        texts=lambda policy: _texts(plane, policy),
    )
    add_page(app, [run], _JobAccess(plane), plane.stopping)
    return app


class _JobAccess:
    """The viewer's key of a job opens its page, and so does the job's own key."""

    def __init__(self, plane: DataPlane) -> None:
        self._keys = plane.keys

    def check(self, request: Request) -> None:
        """Check the key of a request, which the door has admitted, again; see `PageAccess`."""
        self._keys.recheck(request)

    def exchange(self, request: Request) -> str:
        """Return the viewer's key, so that a browser need not keep the job's; see `PageAccess`."""
        return self._keys.viewer_key

    def talk(self, request: Request) -> str | None:
        """Return the key for calling the policies to callers with the job's key; see `PageAccess`."""
        return self._keys.playground_key if isinstance(caller_of(request), JobKey) else None


def _live(plane: DataPlane, checkpoints: PlaygroundCheckpoints) -> LiveState:
    progress, sessions, gpus = plane.progress, plane.sessions, plane.gpus()
    collected, loads = progress.collected, sessions.context.policies.engine_loads
    return LiveState(
        state=progress.state.value,
        reason=progress.reason,
        phase=progress.phase,
        phase_done=None if collected is None else collected.done,
        phase_due=None if collected is None else collected.due,
        step=progress.step,
        seconds_left=progress.seconds_left,
        calls_in_flight=sessions.in_flight,
        tokens_per_second=sessions.context.rate.per_second,
        ignored_fields=dict(plane.ignored),
        workers=plane.workers.busy,
        requests_waiting=sum(load.waiting for load in loads),
        requests_running=sum(load.running for load in loads),
        kv_bytes_used=sum(load.kv_bytes_used for load in loads),
        kv_bytes=sum(load.kv_bytes for load in loads),
        checkpoints=checkpoints.names,
        policies=list(plane.sessions.context.policies.names),
        gpus=list(gpus.cards),
        gpu_problem=gpus.problem,
    )


def _texts(plane: DataPlane, policy: str) -> TokenText:
    vocabulary = plane.sessions.context.policies.runtimes[policy].renderer.vocabulary
    return lambda token: vocabulary.decode([token])
