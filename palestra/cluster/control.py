"""`palestra serve`: the scheduler, its API, and the cluster that it starts model servers on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from palestra.cluster.ray_cluster import LocalRay, connect, stop_local
from palestra.errors import ConfigError
from palestra.http.server import listen, served, url_of
from palestra.scheduler.administration import Administration
from palestra.scheduler.api import ControlPlane, create_control_app
from palestra.scheduler.control_store import ControlStore
from palestra.scheduler.identity import Identities
from palestra.scheduler.keys import NewKey
from palestra.scheduler.limits import RequestRates
from palestra.scheduler.placement import Policy
from palestra.scheduler.rules import Rules
from palestra.scheduler.scheduler import Scheduler
from palestra.waiting import race

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What an operator says."""

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 7400
    database: str | None = None  # None: SQLite in state_dir
    ray_address: str | None = None  # None: a local cluster
    local: LocalRay = field(default_factory=LocalRay)
    without_keys: bool = False
    rules: Rules = field(default_factory=Rules)  # caps of configurations, and models
    pass_env: tuple[str, ...] = ()  # variables that jobs have beside those of `job_environment`
    new_admin_key: bool = False  # for an operator who has lost all keys of the first admin


class ServedControlPlane(NamedTuple):
    """A control plane that is served."""

    plane: ControlPlane
    url: str
    first: NewKey | None  # the admin's, on the first start, or where a new one is asked for
    scheduling: asyncio.Task[None]  # ends by itself only with an error, and then nothing is started any more


@asynccontextmanager
async def control_plane(options: ServeOptions) -> AsyncIterator[ServedControlPlane]:
    """The control plane while it is served.

    Raises:
        ConfigError: the port or the store is in use, no Ray cluster can be had, or keys are turned off where others
            could reach the server.
        StoreError: the control store can't be opened.
    """
    if options.without_keys and options.host not in LOOPBACK:
        raise ConfigError(f"without keys only loopback may be listened on, and not {options.host}")
    options.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # runs have their users' prompts, and keys
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(options.host, options.port))
        url = options.database or f"sqlite:///{options.state_dir.resolve() / 'control.db'}"
        store = stack.enter_context(ControlStore(url))
        await asyncio.to_thread(connect, options.ray_address, options.state_dir, options.local, options.pass_env)
        from palestra.cluster.ray_servers import RayServers  # imports ray, which reads its environment then

        here = options.ray_address is None and options.host in LOOPBACK
        launcher = RayServers("127.0.0.1" if here else None, options.pass_env)
        identities = Identities(store)
        administration = Administration(store, identities)
        first = await administration.first_start()
        if first is None and options.new_admin_key:
            first = await administration.recover()
        scheduler = Scheduler(store, launcher, options.state_dir.resolve() / "jobs", Policy(), rules=options.rules)
        plane = ControlPlane(
            scheduler=scheduler,
            store=store,
            identities=identities,
            administration=administration,
            rates=RequestRates(store.clock),
            rules=options.rules,
            without_keys=options.without_keys,
        )
        stack.callback(plane.pool.close)
        scheduling = asyncio.create_task(scheduler.run())
        try:
            # Before it is ready, the scheduler would refuse whatever is submitted.
            await race(scheduler.ready.wait(), asyncio.shield(scheduling))
            async with served(create_control_app(plane), listener):
                yield ServedControlPlane(plane, url_of(listener), first, scheduling)
                if scheduling.done():
                    scheduling.result()
        finally:
            scheduling.cancel()
            await asyncio.gather(scheduling, return_exceptions=True)
            idle = not await store.live()
            await identities.settle()
            await launcher.close()
            if options.ray_address is None and idle:
                await asyncio.to_thread(stop_local, options.state_dir)


async def serve_control(options: ServeOptions, ready: Callable[[str, NewKey | None], None]) -> None:
    """Serve until SIGINT or SIGTERM; jobs go on then.

    Raises:
        PalestraError: see `control_plane` and `Scheduler.run`.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with control_plane(options) as (_, url, first, scheduling):
        for number in (signal.SIGINT, signal.SIGTERM):  # now: Ray, when it is joined, puts its own there
            loop.add_signal_handler(number, stop.set)
        ready(url, first)
        await race(stop.wait(), asyncio.shield(scheduling))
