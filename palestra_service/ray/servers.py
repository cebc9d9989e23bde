"""Model servers and base servers as Ray actors: detached and named, so that they outlive the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from palestra.errors import NodeLost, PalestraError, RunInUse, ServerFailed
from palestra.http.server import tune_gc
from palestra.models.device import CORES_VARIABLE, MEMORY_VARIABLE, tune_malloc
from palestra.process.child import ProcessStarter
from palestra.runtime.terms import JobPlaces
from palestra.types.gpus import GpuReading
from palestra.waiting import race
from palestra_bases.connection import KEY, KEY_FILE
from palestra_control.jobs import BaseLoad, ProcessResources, Role
from palestra_service.base_process import BaseProcess
from palestra_service.jobs.launcher import (
    ENDED_FILE,
    BaseOrder,
    Ended,
    Ending,
    Listening,
    ServerOrder,
    runner_count,
)
from palestra_service.model_server import ModelServer
from palestra_service.placement.fitting import Node
from palestra_service.ray import memory_watch
from palestra_service.ray.cluster import NAMESPACE, disconnect
from palestra_service.ray.gpu_watch import GpuWatch
from palestra_service.ray.job_environment import limit_environment
from palestra_service.ray.process_host import GIB, Bundles, MemoryLimit, awaited, ray_error_line

log = logging.getLogger("palestra.runtime")
ROOM_SECONDS = 60.0  # limit for a node to free the resources that the scheduler counts as free
NODE_SECONDS = 2.0  # between two checks that the chosen node is alive
START_SECONDS = 600.0  # a large model takes long to load
IN_USE_SECONDS = 5.0  # between two checks whether another process still runs the job
PING_SECONDS, PING_LIMIT_SECONDS = 5.0, 30.0  # a server that does not answer within the limit is killed
STUCK_SECONDS = 5.0  # a stopping job whose event loop is blocked for so long is killed
WORK = "work"  # the empty working directory of a job's process, in the job's folder
KIND_LABEL = "ray.io/accelerator-type"  # of a node, which Ray finds by its driver
FOLDER = "exchange"  # in a job's folder: weights on their way between machines
PREFIX = "palestra-"  # prefix of actors' and placement groups' names


async def always() -> None:
    """Confirm that this process may change the cluster."""


class RayServers:
    """A `Launcher` on a Ray cluster."""

    def __init__(
        self,
        host: str | None = None,
        pass_env: Collection[str] = (),
        confirmed: Callable[[], Awaitable[None]] = always,
    ) -> None:
        """Use the cluster that this process has joined.

        Args:
            host: address for data planes; None: their node's address in the cluster.
            confirmed: awaited immediately before changing the cluster. It raises Superseded if another scheduler has
                taken over, which may have started a server under the same name.
        """
        self._host, self._pass_env, self._confirmed = host, tuple(pass_env), confirmed
        self._gpus = GpuWatch()
        self._killed: dict[str, str] = {}  # jobs that did not stop when asked, and why they were killed

    async def nodes(self) -> list[Node]:
        """Return the nodes of the cluster with their resources. See `Launcher.nodes`."""
        found = []
        try:
            nodes = await asyncio.to_thread(ray.nodes)
        except ray.exceptions.RayError as error:
            raise ServerFailed(f"the Ray cluster does not answer: {ray_error_line(error)}") from error
        for node in nodes:
            has = node["Resources"] or {}
            found.append(
                Node(
                    node_id=node["NodeID"],
                    gpu_kind=(node.get("Labels") or {}).get(KIND_LABEL),
                    labels=_labels(node.get("Labels") or {}),
                    cpus=float(has.get("CPU", 0.0)),
                    gpus=int(has.get("GPU", 0)),
                    memory_gib=float(has.get("memory", 0.0)) / GIB,
                    alive=bool(node["Alive"]),
                )
            )
        return found

    async def gpu_use(self, nodes: Sequence[Node]) -> Mapping[str, GpuReading]:
        """Return the nodes' GPU figures. See `Launcher.gpu_use`."""
        return await self._gpus.read(nodes)

    async def start(self, order: ServerOrder | BaseOrder) -> Listening:
        """Start a server on the node of `order`, and return its address when it listens. See `Launcher.start`."""
        others = order.bundles if isinstance(order, ServerOrder) else ()
        needs, at = order.resources, (order.node, *(bundle.node for bundle in others))
        make: Any = ray.remote(_Actor)
        await self._clear(order.job_id)  # what a scheduler that was superseded may have made meanwhile
        try:
            await self._confirmed()
            group = await _made(
                placement_group,
                [_bundle(part) for part in (needs, *(bundle.resources for bundle in others))],
                strategy="PACK",  # the scheduler has chosen the node of each bundle
                name=_name(order.job_id),
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": node} for node in at],
            )
            async with asyncio.timeout(ROOM_SECONDS):
                await _until_ready(group, set(at))
            await self._confirmed()
            async with asyncio.timeout(START_SECONDS):
                actor = await _made(
                    make.options(
                        max_restarts=0,
                        name=_name(order.job_id),
                        lifetime="detached",
                        num_cpus=needs.cpus,
                        num_gpus=needs.gpus,
                        memory=int(needs.memory_gib * GIB) or None,
                        max_concurrency=16,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
                    ).remote,
                    self._pass_env,
                )
                found = (await race(_listening(actor, order, self._host), _node_lost(group))).result
                if isinstance(found, Ended):
                    raise NodeLost(f"{found.reason}; it is started elsewhere")
                assert isinstance(found, Listening)
                listening = found
        except BaseException as error:
            await asyncio.shield(self._clear(order.job_id))
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PalestraError):
                raise error.cause from None
            if isinstance(error, TimeoutError):
                raise ServerFailed("its machine had no room in time, or the model server did not start") from None
            if isinstance(error, ray.exceptions.RayError):
                raise ServerFailed(f"the model server did not start: {ray_error_line(error)}") from error
            raise
        return listening

    async def find(self, job_id: str) -> Listening | None:
        """Return the running model server of a job, or clean up and return None. See `Launcher.find`."""
        actor, listening = await _actor(job_id), None
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(PING_LIMIT_SECONDS):
                    listening = await actor.listening.remote()
        if listening is None:
            await self._clear(job_id)
        return listening

    async def known(self) -> list[str]:
        """Return the ids of all jobs with an actor or resources in the cluster. See `Launcher.known`."""
        actors, groups = await asyncio.to_thread(lambda: (ray.util.list_named_actors(), placement_group_table()))
        names = {*actors, *(group["name"] for group in groups.values() if group["state"] != "REMOVED")}
        return sorted(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))

    async def ended(self, job_id: str, heard: Callable[[Any], None]) -> Ended:
        """Wait until a server has ended or fallen silent, clean up, and return how it ended. See `Launcher.ended`."""
        actor = await _actor(job_id)
        if actor is None:
            return Ended(ending=Ending.LOST, reason="the model server is gone")
        silence = _until_silent(actor.ping.remote, PING_SECONDS, PING_LIMIT_SECONDS, heard)
        try:
            ended = (await race(_result(actor), silence, _node_lost(await _group(job_id)))).result
            if ended is None:
                return Ended(ending=Ending.LOST, reason=f"it did not answer for {PING_LIMIT_SECONDS:g} s")
            if job_id in self._killed and ended.ending is Ending.LOST:
                return Ended(ending=Ending.LOST, reason=f"{self._killed[job_id]} and was killed")
            return ended
        finally:
            self._killed.pop(job_id, None)
            if not asyncio.current_task().cancelling():  # type: ignore[union-attr]  # if cancelled, the server stays
                await self._clear(job_id)

    async def stop(self, job_id: str, grace_seconds: float) -> None:
        """Ask a model server to save and end, wait at most `grace_seconds`, then kill it. See `Launcher.stop`."""
        actor = await _actor(job_id)
        await self._confirmed()
        if actor is not None and grace_seconds > 0 and (problem := await _stopped(actor, grace_seconds)):
            self._killed[job_id] = problem
        await self._clear(job_id)

    async def close(self) -> None:
        """Leave the cluster; model servers continue. See `Launcher.close`."""
        await self._gpus.close()
        await asyncio.to_thread(disconnect)

    async def _clear(self, job_id: str) -> None:
        """Kill the actor of a job, and free its resources.

        Both are found before the confirmation and ended by id, so that a scheduler superseded afterwards does not end
        its successor's server of the same name.
        """
        actor, group = await _actor(job_id), await _group(job_id)
        if actor is None and group is None:
            return
        await self._confirmed()
        if actor is not None:
            ray.kill(actor)
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)


class _Actor:
    """A server in a process of its own, with the variables, working directory and memory limit of a job."""

    def __init__(self, pass_env: Collection[str]) -> None:
        limit_environment(os.environ, pass_env)
        tune_gc()
        self._pass_env = pass_env
        self._server: ModelServer | BaseProcess = ModelServer()

    async def start(self, order: ServerOrder | BaseOrder, host: str | None) -> Listening:
        here: str = host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        work = order.folder / WORK
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chdir(work)
        _limit_memory(order)
        os.environ[CORES_VARIABLE] = str(max(int(order.resources.cpus - _runners_beside(order)), 1))
        while True:
            try:
                return _at(await self._started(order, here))
            except RunInUse:  # a server on a node that Ray has lost may still run; two must not write one run
                await asyncio.sleep(IN_USE_SECONDS)

    async def _started(self, order: ServerOrder | BaseOrder, here: str) -> str:
        if isinstance(order, BaseOrder):
            tune_malloc()
            self._server = base = BaseProcess()
            return await base.start(order, here)
        _set_base_key(order)
        self._server = model = ModelServer(places_of(order, self._pass_env, here))
        return await model.start(order.config, str(order.folder), here, order.weights)

    async def listening(self) -> Listening | None:
        url = await self._server.address()
        return None if url is None else _at(url)

    async def ended(self) -> Ended:
        return await self._server.ended()

    async def stop(self) -> None:
        await self._server.stop()

    async def answer(self) -> None:
        await self._server.answer()

    async def ping(self) -> float | BaseLoad | None:
        return await self._server.ping()


def places_of(order: ServerOrder, pass_env: Collection[str], here: str) -> JobPlaces:
    """Return where the processes of the calling actor's job run. `here`: this machine's address in the cluster."""
    group = get_current_placement_group()
    assert group is not None

    def of(role: Role) -> ProcessStarter | None:
        # The job's own process has the first bundle of the group.
        own = {index: one for index, one in enumerate(order.bundles, start=1) if one.role == role}
        return Bundles(group, own, pass_env, order.folder, here).start if own else None

    engine, trainer, folder = of("engine"), of("trainer"), None
    if engine is not None or trainer is not None:
        folder = order.folder / FOLDER
        shutil.rmtree(folder, ignore_errors=True)  # what a process that was killed has left there
        folder.mkdir(mode=0o700, parents=True)
    limits = [one.memory_gib for one in order.bundles if one.role == "trainer" and one.memory_gib is not None]
    return JobPlaces(
        runner=of("runner"),
        engine=engine,
        trainer=trainer,
        rank_memory_gib=min(limits, default=None),
        folder=folder,
    )


def _bundle(needs: ProcessResources) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": int(needs.memory_gib * GIB)}
    return {name: amount for name, amount in bundle.items() if amount}


def _runners_beside(order: ServerOrder | BaseOrder) -> int:
    """Return how many runners a server starts within its own resources, because they have no bundle."""
    if isinstance(order, BaseOrder) or any(bundle.role == "runner" for bundle in order.bundles):
        return 0
    return runner_count(order.config)


def _set_base_key(order: ServerOrder) -> None:
    """Let the job read its key for its base server, and no other."""
    os.environ.pop(KEY, None)
    os.environ.pop(KEY_FILE, None)
    if order.base_key is not None:
        os.environ[KEY_FILE] = str(order.base_key)


def _limit_memory(order: ServerOrder | BaseOrder) -> None:
    """Have the job killed if this process and its children, such as runners without a bundle, use too much memory."""
    limit, asked = order.memory_gib, order.resources.memory_gib
    if limit is None:
        return
    os.environ[MEMORY_VARIABLE] = f"{limit:g}"
    if isinstance(order, BaseOrder):
        remedy = "the operator can give base servers more (memory_gib), or fewer slots (docs/how-to/service-engines.md)"
    else:
        remedy = "submit it with more --memory-gib, or make it smaller (docs/how-to/service-rules.md)"
    why = f"it asked for {asked:g} GiB" if asked else f"it asked for none, and its share of the node is {limit:.3g} GiB"
    reason = f"out of memory: its processes had {memory_watch.USED} GiB, and {why}; {remedy}"
    MemoryLimit(limit, reason, order.folder / ENDED_FILE).watch(os.getpid())


def _at(url: str) -> Listening:
    """Return the address of this process's server, with the GPUs that Ray has assigned to it."""
    found = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return Listening(url=url, devices=tuple(int(name) for name in found if str(name).isdigit()))


def _labels(of_node: Mapping[str, str]) -> dict[str, str]:
    """Return a node's labels from the operator, without Ray's own."""
    return {name: value for name, value in of_node.items() if not name.startswith("ray.io/")}


def _name(job_id: str) -> str:
    return f"{PREFIX}{job_id}"


async def _actor(job_id: str) -> Any | None:
    try:
        return await asyncio.to_thread(ray.get_actor, _name(job_id), namespace=NAMESPACE)
    except ValueError:  # Ray raises this if there is no such actor
        return None


async def _group(job_id: str) -> PlacementGroup | None:
    try:
        found: PlacementGroup = await asyncio.to_thread(get_placement_group, _name(job_id))
    except ValueError:
        return None
    return found


async def _made(make: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Call `make` in a thread.

    If cancelled, wait for the thread first, so that its result can be cleaned up.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make, *arguments, **more))
    try:
        return await asyncio.shield(making)
    finally:
        await asyncio.wait((making,))


async def _until_ready(group: PlacementGroup, node_ids: Collection[str]) -> None:
    ready = asyncio.ensure_future(awaited(group.ready()))
    try:
        while not ready.done():
            await asyncio.wait({ready}, timeout=NODE_SECONDS)
            if (gone := await _gone(node_ids)) is not None:
                raise NodeLost(f"node {gone[:12]} is gone; it is started elsewhere")
        ready.result()
    finally:
        ready.cancel()


async def _gone(node_ids: Collection[str]) -> str | None:
    nodes = await asyncio.to_thread(ray.nodes)
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    return min(set(node_ids) - alive, default=None)


async def _node_lost(group: PlacementGroup | None) -> Ended:
    """Wait until a node of a job is dead, which may differ from its own process's.

    The job is restarted on other nodes, from its newest checkpoint: Ray would move the bundle, but not its process.
    """
    found = {} if group is None else await asyncio.to_thread(placement_group_table, group)
    at = {node for node in found.get("bundles_to_node_id", {}).values() if node}
    while True:
        await asyncio.sleep(NODE_SECONDS)
        with contextlib.suppress(ray.exceptions.RayError):  # the cluster does not answer; `_until_silent` decides
            if (gone := await _gone(at)) is not None:
                return Ended(ending=Ending.LOST, reason=f"node {gone[:12]} is gone, which had processes of the job")


async def _result(actor: Any) -> Ended:
    while True:
        try:
            found: Ended = await actor.ended.remote()
        except ray.exceptions.ActorUnavailableError:  # perhaps only for a while; `_until_silent` decides
            await asyncio.sleep(1.0)
        except ray.exceptions.RayError as error:
            return Ended(ending=Ending.LOST, reason=f"its process or its machine is gone: {ray_error_line(error)}")
        else:
            return found


async def _listening(actor: Any, order: ServerOrder | BaseOrder, host: str | None) -> Listening:
    async def until_silent() -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # `start` raises the same error
            await actor.ping.remote()  # answered once the process exists, which has no time limit
        await _until_silent(actor.ping.remote, PING_SECONDS, PING_LIMIT_SECONDS)

    listening: Listening | None = (await race(awaited(actor.start.remote(order, host)), until_silent())).result
    if listening is None:
        raise ServerFailed(f"the model server did not answer for {PING_LIMIT_SECONDS:g} s while it started")
    return listening


async def _stopped(actor: Any, grace_seconds: float) -> str | None:
    """Ask a job to save and end, and wait. Return None if it has ended, or why the wait was given up."""
    silence = _until_silent(actor.answer.remote, STUCK_SECONDS / 5, STUCK_SECONDS)
    first = (await race(_end(actor), silence, asyncio.sleep(grace_seconds))).index
    return (None, f"it did not answer for {STUCK_SECONDS:g} s", f"it took over {grace_seconds:g} s to end")[first]


async def _end(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):  # the actor is gone
        await actor.stop.remote()
        await actor.ended.remote()


async def _until_silent(
    ping: Callable[[], Any],
    every_seconds: float,
    limit_seconds: float,
    heard: Callable[[Any], None] = lambda _: None,
) -> None:
    """Wait until a server has not answered `ping` for `limit_seconds`. Its death is detected elsewhere.

    Silence is counted in waits, not by the clock: a process that is stopped itself hears no answer. `every_seconds` is
    the time between pings, and `heard` is called with every answer.
    """
    silent_seconds, asked = 0.0, None
    try:
        while silent_seconds < limit_seconds:
            asked = asked or asyncio.ensure_future(awaited(ping()))
            await asyncio.wait({asked}, timeout=every_seconds)
            if not asked.done():
                silent_seconds += every_seconds
                continue
            try:
                answer = asked.result()
            except ray.exceptions.RayError:
                silent_seconds += every_seconds
            else:
                silent_seconds = 0.0
                heard(answer)
            asked = None
            await asyncio.sleep(every_seconds)
    finally:
        if asked is not None:
            asked.cancel()
