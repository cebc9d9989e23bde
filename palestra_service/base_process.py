"""`BaseProcess`: a base server of a service, in a process that another component starts and watches."""

from __future__ import annotations

import asyncio
import logging
import traceback
from urllib.parse import urlsplit

from palestra.config import TrainerConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.errors import StoreError
from palestra.models.catalog import exact_model
from palestra.runtime.run_dir import starting_in
from palestra.threads import in_thread
from palestra.waiting import race
from palestra_bases.admissions import FILE, Admissions
from palestra_bases.models import SharedModelOptions, shared_models
from palestra_bases.server import HostedJobs
from palestra_bases.serving import BaseOptions, LoadedBase
from palestra_control.jobs import BaseLoad
from palestra_service.jobs.launcher import BaseOrder, Ended, Ending, ending_of
from palestra_service.model_server import ServedProcess

LOOK_SECONDS = 0.5  # between two readings of the admissions
log = logging.getLogger("palestra.base")


class BaseProcess(ServedProcess):
    """Serves a base to the jobs that a service admits."""

    def __init__(self) -> None:
        super().__init__()
        self._serving: asyncio.Task[Ended] | None = None
        self._stop = asyncio.Event()
        self._base: LoadedBase | None = None

    async def start(self, order: BaseOrder, host: str) -> str:
        """Load the model and serve it; return the address when the server listens."""
        with self._starting(order.folder):
            listening = asyncio.Event()
            self._serving = asyncio.create_task(self._serve(order, host, listening))
            await race(listening.wait(), asyncio.shield(self._serving))
            if self._url is None:
                await self._serving
            assert self._url is not None
            return self._url

    async def ended(self) -> Ended:
        """Wait until the server has ended, and return how."""
        assert self._serving is not None, "start it first"
        return await asyncio.shield(self._serving)

    async def stop(self) -> None:
        """Ask the server to end. Connected jobs wait for another one at its address."""
        self._stop.set()

    async def ping(self) -> BaseLoad:
        """Return the server's load."""
        if self._base is None:
            return BaseLoad()
        tenants = self._base.load.tenants
        return BaseLoad(
            waiting=sum(tenant.waiting for tenant in tenants),
            longest_wait=max((tenant.longest_wait for tenant in tenants), default=0.0),
            tokens=sum(tenant.tokens for tenant in tenants),
        )

    async def _serve(self, order: BaseOrder, host: str, listening: asyncio.Event) -> Ended:
        """Serve until `stop`, and return how the server ended; before it listens, its error is raised."""
        try:
            reason = await self._serve_jobs(order, host, listening)
        except Exception as error:
            if self._url is None:
                raise
            self._say(traceback.format_exc())
            return self._ended(ending_of(error), f"{type(error).__name__}: {error}")
        return self._ended(Ending.STOPPED) if reason is None else self._ended(Ending.LOST, reason)

    async def _serve_jobs(self, order: BaseOrder, host: str, listening: asyncio.Event) -> str | None:
        """Serve until `stop`, and return None; or until the engine fails, and return the reason."""
        with starting_in(order.folder) as start:
            admissions = Admissions(order.folder / FILE)
            options = await in_thread(lambda: _options(order))
            async with shared_models(options.shared) as shared:
                base = self._base = await in_thread(lambda: LoadedBase(options, shared, own_folders=True))
                start.succeeded = True
                try:
                    server = HostedJobs(base, admissions.of, options.most_policies)
                    port = 0 if order.address is None else urlsplit(order.address).port
                    async with server.listen(None, host, port or 0) as address:
                        self._url = address
                        self._say(f"base {order.model} at {address}\n")
                        listening.set()
                        first = await race(
                            self._stop.wait(), shared.engine.failure(), _follow(admissions, base, server)
                        )
                        return str(first.result) if first.index == 1 else None
                finally:
                    base.close()


async def _follow(admissions: Admissions, base: LoadedBase, server: HostedJobs) -> None:
    """Apply changes of the admissions file: shares of jobs, and ended admissions."""
    while True:
        try:
            admissions.read()
        except StoreError as error:  # the disk may be back in a moment; nothing is admitted or ended until then
            log.error("%s", error)
        base.weigh(admissions.weights)
        for job_id in sorted(admissions.take_gone()):
            await server.remove(job_id)
        await asyncio.sleep(LOOK_SECONDS)


def _options(order: BaseOrder) -> BaseOptions:
    """Return the options of the base server, with the folder of its model."""
    given = {"dtype": order.dtype}
    shared = SharedModelOptions(
        models=(str(exact_model(order.model)),),
        engine=EmbeddedEngineConfig.model_validate(given),
        trainer=TrainerConfig.model_validate(given),
        deterministic=order.deterministic,
        slots=order.slots,
    )
    return BaseOptions(shared=shared, folder=order.folder, runs=order.jobs)
