"""Checkpoints of a running job that its engine answers as, so that people can talk to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request

from palestra.config import JobConfig
from palestra.errors import Forbidden, NotFound
from palestra.models.saved_weights import SavedWeights
from palestra.runtime.checkpoints import all_checkpoints
from palestra.server import DataPlane
from palestra.session.policies import PolicySet
from palestra.threads import in_thread
from palestra.trainer import checkpoint
from palestra.types.calls import PolicyVersion


class LoadedCheckpoint(BaseModel):
    """The answer to `POST /v1/checkpoints/{name}`."""

    model: str = Field(description="Name under which calls are answered by it, until another one is loaded.")


class TalkCheckpoints:
    """The checkpoint that the engine has beside the present policies: one at a time, because each is a whole model."""

    def __init__(self, config: JobConfig, folder: Path, policies: PolicySet) -> None:
        """Load nothing.

        Args:
            policies: get the one that is loaded, as a past version.
        """
        self._config, self._folder, self._policies = config, folder, policies
        self._lock, self._loaded = asyncio.Lock(), ""

    @property
    def names(self) -> list[str]:
        """Return the names of the checkpoints that there are, such as `policy@step-20`, the newest of each first."""
        return list(all_checkpoints(self._config, self._folder))

    async def load(self, name: str) -> None:
        """Let the engine answer as a checkpoint, in place of the one that was loaded before.

        Raises:
            NotFound: there is no such checkpoint, or not any more.
            CheckpointError: it is damaged.
            ModelError: its weights do not fit the model.
        """
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


def add_checkpoint_route(app: FastAPI, plane: DataPlane, checkpoints: TalkCheckpoints) -> None:
    """Add the route that loads a checkpoint."""

    @app.post("/v1/checkpoints/{name}", tags=["model"])
    async def load(request: Request, name: str) -> LoadedCheckpoint:
        """Let the engine answer as a checkpoint of this job, beside its present policies, until another one is loaded.

        Calls that are made with the key for talking are not recorded. The key of an episode does not open this route:
        an episode is played by the policies that the job gives it.
        """
        if not (plane.keys.opens_job(request) or plane.keys.opens_talk(request)):
            raise Forbidden("this is the key of an episode; a checkpoint is loaded with the job's key")
        await checkpoints.load(name)
        return LoadedCheckpoint(model=name)
