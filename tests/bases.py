"""A base server in the test's own process, over an engine and a trainer that the test gives."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from palestra.errors import Unauthorized
from palestra.types.calls import FIRST_VERSION
from palestra_bases.base import BaseDescription, SamplerSpec
from palestra_bases.link import Link
from palestra_bases.remote import RemoteEngine, RemoteTrainer
from palestra_bases.server import HostedJobs

KEYS = {"key-of-ada": "ada", "key-of-ben": "ben"}


def tenant_of(key: str | None) -> str:
    if key not in KEYS:
        raise Unauthorized("this is no key of this server")
    return KEYS[key]


class GivenBase:
    """A `LoadedBase` of given parts; a policy is sampled from a copy of the engine's `policy`."""

    def __init__(self, engine: Any, trainer: Any, folder: Path, vocab_size: int = 259) -> None:
        self.engine, self.trainer, self._folder = engine, trainer, folder.resolve()
        self.removed: list[str] = []
        self.description = BaseDescription(
            model="given",
            vocab_size=vocab_size,
            max_positions=2048,
            max_context=2048,
            dtype="float32",
            trainer_dtype="float32",
            deterministic=False,
            tokenizer={"tokenizer.json": np.frombuffer(b"{}", np.uint8)},
            tokenizer_name="given",
            numerics={"torch": "given"},
        )

    def parts_of(self, tenant: str) -> Any:
        return self.engine, self.trainer

    def folder_of(self, tenant: str) -> Path:
        return self._folder

    def own_folder(self) -> Path | None:
        return self._folder / "server"

    async def sample(self, name: str, spec: SamplerSpec) -> None:
        await self.engine.add_policy(name, "policy", FIRST_VERSION, None)

    def is_base(self, model: str) -> bool:
        return False

    def check(self, spec: Any) -> None:
        return

    async def remove(self, tenant: str) -> None:
        self.removed.append(tenant)

    async def failure(self) -> str:
        return str(await self.engine.failure())


class Whole:
    """What stands for an engine or a trainer in a job, with what is answered in the job's process."""

    def __init__(self, local: RemoteEngine | RemoteTrainer) -> None:
        self.local = local
        self._whole: Any = local.engine if isinstance(local, RemoteEngine) else local.trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole if hasattr(self._whole, name) else self.local, name)


class Served:
    """A base server, and what stands for its engine and trainer in jobs."""

    def __init__(self, server: HostedJobs, address: str, folder: Path) -> None:
        self.server, self.address, self.folder = server, address, folder
        self._links: list[Link] = []

    async def link(self, tenant: str = "ada", job: str = "job", patience_seconds: float = 30.0) -> Link:
        link = Link(self.address, f"key-of-{tenant}", job, patience_seconds)
        self._links.append(link)
        await link.renew()
        return link

    async def job(self, tenant: str = "ada", job: str = "job", **options: Any) -> tuple[Any, Any]:
        link = await self.link(tenant, job, **options)
        return Whole(RemoteEngine(link)), Whole(RemoteTrainer(link, 2))

    async def close(self) -> None:
        for link in self._links:
            await link.leave()


@contextlib.asynccontextmanager
async def served(
    engine: Any, trainer: Any, folder: Path, socket: str = "socket", **options: Any
) -> AsyncIterator[Served]:
    """A base server on a Unix socket in `folder`, where the files of all tenants are."""
    server = HostedJobs(GivenBase(engine, trainer, folder), tenant_of, **options)
    async with server.listen(folder / socket) as address:
        made = Served(server, address, folder)
        try:
            yield made
        finally:
            await made.close()
