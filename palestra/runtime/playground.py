"""Loads checkpoints of a running job into its engine, for the chat playground."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request

from palestra.config import JobConfig
from palestra.errors import Forbidden, NotFound
from palestra.models.saved_weights import SavedWeights
from palestra.runtime.starting_points import all_checkpoints
from palestra.server import DataPlane
from palestra.server.auth import JobKey, PlaygroundKey, caller_of
from palestra.session.policies import PolicySet
from palestra.threads import in_thread
from palestra.trainer import checkpoint
from palestra.types.calls import PolicyVersion


class LoadedCheckpoint(BaseModel):
    """The answer to `POST /v1/checkpoints/{name}`."""

    model: str = Field(description="Name under which calls are answered by it, until another one is loaded.")


class PlaygroundCheckpoints:
    """The engine's additional checkpoint: one at a time, because each is a whole model."""

    def __init__(self, config: JobConfig, folder: Path, policies: PolicySet) -> None:
        """Begin without a checkpoint.

        Args:
            policies: gets the loaded one, as a past version.
        """
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
