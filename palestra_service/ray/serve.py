"""`palestra serve`: the scheduler, its API, and the Ray cluster for model servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from palestra.disk import private_folder
from palestra.errors import ConfigError, StoreError
from palestra.http.server import LOOPBACK, listen, served, url_of
from palestra.waiting import race
from palestra_service.accounts.administration import Administration
from palestra_service.accounts.identity import Identities
from palestra_service.api import ControlPlane
from palestra_service.jobs.rules import Rules
from palestra_service.jobs.scheduler import JobScheduler
from palestra_service.page import create_service_app
from palestra_service.placement.placement import PlacementPolicy
from palestra_service.ray.cluster import LocalRay, connect, stop_local
from palestra_service.rights import NewKey, RequestRates
from palestra_service.store.control_store import ControlStore


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """An operator's options of `palestra serve`.

    Attributes:
        state_dir: folder of the control store, of jobs, and of the local cluster's record.
        database: URL of the control store's database; None: SQLite in `state_dir`.
        without_keys: whether requests need no key; only allowed on loopback.
        rules: caps of jobs' configurations, and their models.
        pass_env: variables for jobs, in addition to those of `job_environment`.
        new_admin_key: whether to create a new key for the first admin, because all earlier ones were lost.
    """

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 7400
    database: str | None = None
    ray_address: str | None = None
    local: LocalRay = field(default_factory=LocalRay)
    without_keys: bool = False
    rules: Rules = field(default_factory=Rules)
    pass_env: tuple[str, ...] = ()
    new_admin_key: bool = False


class ServedControlPlane(NamedTuple):
    """A control plane that is being served."""

    plane: ControlPlane
    url: str
    scheduling: asyncio.Task[None]  # ends by itself only with an error; no job starts afterwards


@asynccontextmanager
async def control_plane(
    options: ServeOptions, show_key: Callable[[NewKey | None, bool], None] = lambda key, unused: None
) -> AsyncIterator[ServedControlPlane]:
    """Serve the control plane while the block is open. `show_key`: called before anything else can fail: with the first
    admin's key, if this start created one, and with whether no key of the first admin was ever used.
    """
    if options.without_keys and options.host not in LOOPBACK:
        raise ConfigError(f"without keys only loopback may be listened on, and not {options.host}")
    private_folder(options.state_dir)  # runs contain prompts and keys
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(options.host, options.port))
        url = options.database or f"sqlite:///{options.state_dir.resolve() / 'control.db'}"
        store = stack.enter_context(ControlStore(url))
        identities = Identities(store)
        administration = Administration(store, identities)
        first = await administration.recover() if options.new_admin_key else await administration.first_start()
        show_key(first, await administration.first_admin_is_unused())
        await asyncio.to_thread(connect, options.ray_address, options.state_dir, options.local, options.pass_env)
        from palestra_service.ray.servers import RayServers  # imports ray, which reads its environment then

        here = options.ray_address is None and options.host in LOOPBACK
        launcher = RayServers("127.0.0.1" if here else None, options.pass_env, store.confirmed)
        scheduler = JobScheduler(
            store, launcher, options.state_dir.resolve() / "jobs", PlacementPolicy(), rules=options.rules
        )
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
        scheduling, stopping = asyncio.create_task(scheduler.run()), asyncio.Event()
        try:
            # Until it knows the cluster's nodes, the scheduler would refuse every job, so the API opens only then.
            await race(scheduler.ready.wait(), asyncio.shield(scheduling))
            async with served(create_service_app(plane, stopping), listener, stopping.set):
                yield ServedControlPlane(plane, url_of(listener), scheduling)
                if scheduling.done():
                    scheduling.result()
        finally:
            scheduling.cancel()
            await asyncio.gather(scheduling, return_exceptions=True)
            idle = await _is_idle(store)
            await identities.settle()
            await launcher.close()
            if options.ray_address is None and idle:
                await asyncio.to_thread(stop_local, options.state_dir)


async def _is_idle(store: ControlStore) -> bool:
    try:
        await store.confirm()
        return not await store.live()
    except StoreError:
        return False


async def serve_control(
    options: ServeOptions, ready: Callable[[str], None], show_key: Callable[[NewKey | None, bool], None]
) -> None:
    """Serve the control plane until SIGINT or SIGTERM; running jobs continue. `ready`: called with the URL when the
    server listens. Raises Superseded if another control plane has taken over the control store.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with control_plane(options, show_key) as (_, url, scheduling):
        for number in (signal.SIGINT, signal.SIGTERM):  # after `ray.init`, which sets handlers of its own
            loop.add_signal_handler(number, stop.set)
        ready(url)
        await race(stop.wait(), asyncio.shield(scheduling))
