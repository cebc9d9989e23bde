"""The page of a job in this process: its run, and live data of the process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request

from palestra.config import JobConfig
from palestra.dashboard.answers import LiveState
from palestra.dashboard.files import PAGE, public_paths
from palestra.dashboard.routes import add_page
from palestra.dashboard.runs import Run, TokenText
from palestra.engine.base import WorkerPool
from palestra.errors import Conflict, Forbidden, InvalidRequest, NotFound
from palestra.http.app import PUBLIC, GuardedApp
from palestra.http.protocol import until_disconnect
from palestra.models.weights import SavedWeights
from palestra.runtime.starting_points import all_checkpoints
from palestra.server import DataPlane, create_app
from palestra.server.auth import JobKey, PlaygroundKey, caller_of, require_job
from palestra.session.policies import PolicySet
from palestra.threads import in_thread
from palestra.trainer import checkpoint
from palestra.types.calls import PolicyVersion
from palestra.types.wire import Body


class Replicas(Body):
    """The body of `POST /engine/replicas`, and its answer."""

    replicas: int = Field(strict=True, ge=1, le=64, description="Inference workers.")


def add_scaling_route(app: FastAPI, plane: DataPlane, pool: WorkerPool | None, most: int | None) -> None:
    """Add the route that changes the number of inference workers. `most`: limit; None: any number."""

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


class LoadedCheckpoint(BaseModel):
    """The answer to `POST /v1/checkpoints/{name}`."""

    model: str = Field(description="Name under which calls are answered by it, until another one is loaded.")


class PlaygroundCheckpoints:
    """The engine's additional checkpoint: one at a time, because each is a whole model."""

    def __init__(self, config: JobConfig, folder: Path, policies: PolicySet) -> None:
        self._config, self._folder, self._policies = config, folder, policies
        self._lock, self._loaded = asyncio.Lock(), ""

    @property
    def names(self) -> list[str]:
        """Return the names of existing checkpoints, such as `policy@step-20`, each policy's newest first."""
        return list(all_checkpoints(self._config, self._folder))

    async def load(self, name: str) -> None:
        """Load a checkpoint into the engine, replacing the previous one."""
        async with self._lock:
            if name == self._loaded:
                return
            if (known := all_checkpoints(self._config, self._folder).get(name)) is None:
                raise NotFound(f"there is no checkpoint {name!r}; there are {', '.join(self.names) or 'none yet'}")
            policy, step, path = known
            found = await in_thread(lambda: checkpoint.good(path.parent, step))
            if found is None:
                raise NotFound(f"the checkpoint {name!r} was removed; checkpoint.keep says how many stay")
            engine = self._policies.runtimes[policy].engine
            if self._loaded:
                await self._policies.runtimes[self._loaded.rpartition("@")[0]].engine.remove_policy(self._loaded)
                self._policies.remove_past(self._loaded)
                self._loaded = ""
            await engine.add_policy(name, policy, PolicyVersion(0, step), SavedWeights(found[0]))
            self._policies.add_past(name, policy)
            self._loaded = name


def add_checkpoint_route(app: FastAPI, plane: DataPlane, checkpoints: PlaygroundCheckpoints) -> None:
    """Add the route that loads a checkpoint."""

    @app.post("/v1/checkpoints/{name}", tags=["model"])
    async def load(request: Request, name: str) -> LoadedCheckpoint:
        """Let the engine answer as a checkpoint of this job, in addition to its present policies, until another is
        loaded.

        Calls with the chat playground's key are not recorded. An episode's key is refused: the job chooses the policies
        that play an episode.
        """
        if not isinstance(caller_of(request), JobKey | PlaygroundKey):
            raise Forbidden("this is the key of an episode; a checkpoint is loaded with the job's key")
        await checkpoints.load(name)
        return LoadedCheckpoint(model=name)


def create_job_app(plane: DataPlane, pool: WorkerPool | None = None, most_replicas: int | None = None) -> GuardedApp:
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
    loads = plane.sessions.context.policies.engine_loads
    return LiveState(
        **plane.brief_status(plane.gpus()),
        calls_in_flight=plane.sessions.in_flight,
        requests_waiting=sum(load.waiting for load in loads),
        requests_running=sum(load.running for load in loads),
        kv_bytes_used=sum(load.kv_bytes_used for load in loads),
        kv_bytes=sum(load.kv_bytes for load in loads),
        checkpoints=checkpoints.names,
    )


def _texts(plane: DataPlane, policy: str) -> TokenText:
    vocabulary = plane.sessions.context.policies.runtimes[policy].renderer.vocabulary
    return lambda token: vocabulary.decode([token])
