"""Drivers of engines that are other projects' servers, running already or started by the job."""

from __future__ import annotations

import asyncio
import os
import socket
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from palestra.config import JobConfig
from palestra.engine.driver import EngineDriver, EngineJob, LoadedEngine, WorkerHost, Workers
from palestra.errors import ConfigError, EngineFailure, EngineKeyRefused, PalestraError, ServerFailed
from palestra_engines.external.config import ServerEngineConfig

if TYPE_CHECKING:
    from palestra.models.vision.processor import PictureProcessor
    from palestra.types.messages import Pictures
    from palestra_engines.external.api import EngineApi
    from palestra_engines.external.connection import Address
    from palestra_engines.external.served_models import ServedModel
    from palestra_engines.external.served_policy import ExternalPolicy
    from palestra_engines.external.workers import OneServer, ServerPlaces

Servers = TypeVar("Servers", bound=ServerEngineConfig)
CONNECT_SECONDS = 3.0


class ServerDriver(EngineDriver[Servers]):
    """Servers of another project, one for each policy of a worker. A kind defines its routes, and
    possibly a command.
    """

    # What a kind has

    @abstractmethod
    def api(self, table: Servers, model: ServedModel, address: Address, rounds: Any, *, is_started: bool) -> EngineApi:
        """Return the routes of a policy's server. `is_started`: the job has started the server."""

    def images(self, processor: PictureProcessor, pictures: Pictures, trained: bool) -> Any:
        """Return what prepares the images of prompts for a server, if `reads_images`. `trained`: the vision tower
        changes with the weights.
        """
        raise NotImplementedError

    def finishes(self, model: ServedModel) -> bool:
        """Return whether new weights of a policy wait until running replies are complete."""
        return True

    def rounds(self, table: Servers) -> Any:
        """Return the rounds that broadcast whole weights to all servers; None: they are sent as files."""
        return None

    def broadcast(self, known: Mapping[str, Any], rounds: Any) -> ExternalPolicy:
        """Return a policy whose weights are broadcast."""
        raise NotImplementedError

    def places(self, job: EngineJob, table: Servers, models: Sequence[ServedModel]) -> ServerPlaces:
        """Return the resources of each server that the job starts. Blocks briefly."""
        raise NotImplementedError

    def command(
        self, table: Servers, model: ServedModel, address: Address, private: Path, place: Any
    ) -> tuple[Sequence[str], Mapping[str, str], int]:
        """Return the command and environment of a started server, and the bytes of its cache. `private` is a folder of
        only this server; `place` is its entry of `ServerPlaces.of_worker`.
        """
        raise NotImplementedError

    def wait_until_ready(self, table: Servers, server: OneServer) -> None:
        """Block until a started server answers."""
        raise NotImplementedError

    # What all kinds have in common

    def check(self, job: JobConfig, key: str, table: Servers) -> Iterator[tuple[str, str]]:
        """Yield what makes the servers impossible; see `EngineDriver`."""
        rounds = None
        try:
            rounds = self.rounds(table)
        except ConfigError as error:
            address = getattr(table, "weights_address", None)
            yield f"{key}.{'weight_transfer' if address is None else 'weights_address'}", str(error)
        if table.urls:
            yield from self._impossible_urls(job, key, table, rounds)
        variable = table.key_variable
        if variable is not None and not os.environ.get(variable):
            yield f"{key}.key_variable", f"{key}.key_variable is {variable!r}, and that variable is not set here"

    def _impossible_urls(self, job: JobConfig, key: str, table: Servers, rounds: Any) -> Iterator[tuple[str, str]]:
        """Yield why servers that run already are not there, or do not fit the job's policy."""
        from palestra_engines.external.served_models import read_served_models
        from palestra_engines.external.workers import inspect_servers

        silent = {url: problem for url in table.urls if (problem := _unreachable(url)) is not None}
        for url, problem in silent.items():
            yield f"{key}.url", f"nothing answers at {url} ({problem}); start the server first, or correct {key}.url"
        if table.key_variable is not None and not os.environ.get(table.key_variable):
            return
        answering = table.model_copy(update={"url": tuple(url for url in table.urls if url not in silent)})
        try:
            models = read_served_models(EngineJob(config=job), self.images)
        except PalestraError:  # a model, or a key of a policy, that other checks name
            return
        try:
            wrong = asyncio.run(inspect_servers(self, answering, models[0], rounds))
        except ConfigError as error:
            yield f"{key}.key_variable", str(error)
            return
        for refused in wrong:
            yield f"{key}.{'key_variable' if isinstance(refused, EngineKeyRefused) else 'url'}", str(refused)

    def load(self, job: EngineJob, table: Servers) -> LoadedEngine:
        """Start a server for each policy on the machine of this process, a worker with its own bundle.

        The servers listen on Unix sockets, so that no other machine reaches them, and end with this process. New
        weights are files in a folder shared by all machines of the job, which the server reads itself.
        """
        from palestra_engines.external.served_models import read_served_models, sampled_policies
        from palestra_engines.external.workers import EngineServers

        models = read_served_models(job, self.images)
        places = self.places(job, table, models)
        places.check_memory([0])
        try:
            engine = EngineServers(self, table, models, job.worker, job.config.folder, places.of_worker(0)).engine()
        except EngineFailure as error:
            raise ServerFailed(str(error)) from error  # what takes too long would take as long five times
        return LoadedEngine(engine, sampled_policies(job, models), engine.check_servers)

    def workers(self, job: EngineJob, table: Servers, host: WorkerHost, others: int = 0) -> Workers:
        """Return what starts or finds the servers: in this process, or in those of bundles; see `EngineDriver`."""
        from palestra_engines.external.served_models import read_served_models, sampled_policies
        from palestra_engines.external.workers import ServerWorkers

        models = read_served_models(job, self.images)
        if host.in_bundles and table.started_count:
            hosted = super().workers(job, table, host, others)
            return replace(hosted, policies=lambda: sampled_policies(job, models))
        servers = ServerWorkers(self, job, table, models)
        return Workers(
            start=servers.start,
            count=table.worker_count,
            most=servers.most,
            policies=lambda: sampled_policies(job, models),
            check_capacity=servers.check_capacity,
        )


def _unreachable(url: str) -> str | None:
    """Return why a server refuses connections; None: it does not."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None
