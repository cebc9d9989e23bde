"""Programs of a job in the bundles of its placement group, each run by an actor and connected with the job by TCP.

The actor holds the bundle's cores, GPUs and memory, and starts the same program as on the job's own machine
(`palestra.process`), with the variables that Ray has set for the actor, such as the bundle's GPUs. So an inference
worker or a rank does not depend on Ray. The actor connects to a port opened only for it, and authenticates with a
secret first. Actor and program end with the job: Ray ends the actors of a removed placement group, and the kernel ends
the program with its actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import os
import secrets
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from palestra.errors import PalestraError, ServerFailed
from palestra.models.device import CORES_VARIABLE, MEMORY_VARIABLE
from palestra.process.child import HOSTED, ChildProcess, computing, ending, popen
from palestra.threads import in_thread
from palestra.waiting import cancelled, race
from palestra_service.jobs.launcher import LOG_FILE, BundleOrder, Ended, Ending, ended_text, read_ended
from palestra_service.ray import memory_watch
from palestra_service.ray.job_environment import limit_environment

GIB = 2**30
CONNECT_SECONDS = 30.0  # for the actor to reach the job, and to show its secret
AGAIN_SECONDS = 1.0  # between two questions to an actor that can't be reached
SECRET_BYTES = 32
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory limit of a process, with its children.

    Attributes:
        gib: a process that uses more is killed.
        reason: of that, with `memory_watch.USED` for the GiB in use.
        ended: file in which the reason is then written.
    """

    gib: float
    reason: str
    ended: Path

    def watch(self, pid: int) -> None:
        """Kill a process and its children if they use too much memory, by a watcher of its own; see `memory_watch`."""
        text = ended_text(Ended(ending=Ending.FAILED, reason=self.reason))
        command = memory_watch.watching(pid, int(self.gib * GIB), self.ended, text, self.ended.with_name(LOG_FILE))

        def keep_watching() -> None:
            # The watcher may be killed itself, perhaps because the machine was short of memory.
            while subprocess.run(command, check=False).returncode != 0:
                time.sleep(1.0)

        threading.Thread(target=keep_watching, name="palestra-memory", daemon=True).start()

    def said(self) -> str | None:
        """Return why the process was killed; None: not because of its memory. Blocks for the disk."""
        found = read_ended(self.ended.parent, self.ended.name)
        return None if found is None else found.reason


class Bundles:
    """The bundles of one role, with one process each at a time."""

    def __init__(
        self,
        group: PlacementGroup,
        bundles: Mapping[int, BundleOrder],
        pass_env: Collection[str],
        folder: Path,
        here: str,
    ) -> None:
        """Take empty bundles over. `here`: address of this machine, at which others reach the job."""
        self._group, self._bundles, self._folder, self._here = group, dict(bundles), folder, here
        self._pass_env = tuple(pass_env)
        self._free: asyncio.Queue[int] | None = None

    def empty(self) -> asyncio.Queue[int]:
        """Return the indices of bundles without a process, initially in order."""
        if self._free is None:  # made on the event loop that uses it
            self._free = asyncio.Queue()
            for index in sorted(self._bundles):
                self._free.put_nowait(index)
        return self._free

    def memory_limit(self, index: int) -> MemoryLimit | None:
        """Return the memory limit of a bundle's next process; None: unlimited. Blocks for the disk."""
        order = self._bundles[index]
        ended = self._folder / f"ended-{order.role}-{index}.json"
        ended.unlink(missing_ok=True)  # of the process before
        if (most := order.memory_gib) is None:
            return None
        reason = f"it used {memory_watch.USED} GiB of memory, and its bundle has {most:.3g}; give it more memory_gib"
        return MemoryLimit(most, reason, ended)

    def actor(self, index: int, make: Any, *arguments: Any, **options: Any) -> Any:
        """Return an actor that holds a whole bundle."""
        holds = self._bundles[index].resources
        return make.options(
            max_restarts=0,
            num_cpus=holds.cpus,
            num_gpus=holds.gpus,
            memory=int(holds.memory_gib * GIB) or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            **options,
        ).remote(*arguments)

    async def start(self, module: str, variables: Mapping[str, str]) -> HostedProcess:
        """Start a program in an empty bundle, waiting for one if necessary. See `ProcessStarter`."""
        index = await self.empty().get()
        order, secret = self._bundles[index], secrets.token_bytes(SECRET_BYTES)
        try:
            with contextlib.ExitStack() as undo:  # what a start leaves that fails or is cancelled
                undo.callback(self._give_back, index)
                with socket.create_server((self._here, 0)) as listener:
                    listener.setblocking(False)
                    make = partial(self.actor, index, ray.remote(_ProcessHost), self._pass_env, max_concurrency=4)
                    making = asyncio.ensure_future(asyncio.to_thread(make))
                    try:
                        await asyncio.shield(making)
                    finally:  # also when the start is cancelled: the actor would keep the bundle
                        await asyncio.wait((making,))
                        actor = making.result()
                        undo.callback(ray.kill, actor)
                    limit = await asyncio.to_thread(self.memory_limit, index)
                    given = (module, listener.getsockname(), secret, _variables(order) | dict(variables), limit)
                    starting = asyncio.ensure_future(awaited(actor.start.remote(*given)))
                    try:
                        connection = (await race(_accepted(listener, secret), _failed(starting))).result
                        assert connection is not None
                        undo.callback(connection.close)
                        started = await starting
                    finally:
                        starting.cancel()
                undo.pop_all()
            return HostedProcess(started, connection, actor, limit, partial(self._give_back, index))
        except OSError as error:
            raise ServerFailed(f"the {order.role} process can't be connected with the job: {error}") from error
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
            said = cause if isinstance(cause, PalestraError) else ray_error_line(error)
            raise ServerFailed(f"the {order.role} process on node {order.node[:12]} did not start: {said}") from error

    def _give_back(self, index: int) -> None:
        self.empty().put_nowait(index)


def _variables(order: BundleOrder) -> dict[str, str]:
    found = {HOSTED: "1", CORES_VARIABLE: str(max(int(order.resources.cpus), 1))}
    return found if order.memory_gib is None else found | {MEMORY_VARIABLE: f"{order.memory_gib:g}"}


async def _accepted(listener: socket.socket, secret: bytes) -> socket.socket:
    """Return the first connection that shows the secret; others are closed, and delay no other."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[socket.socket] = loop.create_future()
    looking: dict[socket.socket, asyncio.Task[None]] = {}

    async def look(connection: socket.socket) -> None:
        if not await _shows(connection, secret):
            connection.close()
        elif not found.done():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.set_result(connection)

    async def accept() -> socket.socket:
        while True:
            connection, _ = await loop.sock_accept(listener)
            looking[connection] = asyncio.create_task(look(connection))

    taken = None
    try:
        taken = (await race(found, accept())).result
        return taken
    finally:
        await cancelled(*looking.values())
        for connection in looking.keys() - {taken}:
            connection.close()


async def _shows(connection: socket.socket, secret: bytes) -> bool:
    """Return whether the other side of a connection sends the secret in time."""
    shown = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            while len(shown) < len(secret):
                part = await asyncio.get_running_loop().sock_recv(connection, len(secret) - len(shown))
                if not part:
                    return False
                shown += part
    return hmac.compare_digest(shown, secret)


async def _failed(starting: asyncio.Future[Any]) -> None:
    """Wait forever, or raise the error of the start."""
    await asyncio.shield(starting)
    await asyncio.Event().wait()


async def awaited(reference: Any) -> Any:
    """Await an answer of Ray, which is no coroutine."""
    return await reference


def ray_error_line(error: Exception) -> str:
    """Return what an error of Ray says, without its traces."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class HostedProcess(ChildProcess):
    """A program in a bundle."""

    def __init__(
        self,
        started: tuple[int, str],
        connection: socket.socket,
        actor: Any,
        limit: MemoryLimit | None,
        free: Callable[[], None],
    ) -> None:
        """Wrap a running program. `started`: its id, and the address of its machine. `free`: called when the bundle is
        empty again.
        """
        self._actor, self._limit, self._free = actor, limit, free
        super().__init__(*started, connection, self._end())

    def kill(self) -> None:
        """Kill the program with its actor, without waiting."""
        ray.kill(self._actor)

    async def _end(self) -> tuple[int | None, str]:
        try:
            code, said = await self._code()
        finally:
            ray.kill(self._actor)  # so that the bundle is free for another
            self._free()
        written = None if self._limit is None else await asyncio.to_thread(self._limit.said)
        return code, said if written is None else f"{said}: {written}"

    async def _code(self) -> tuple[int | None, str]:
        while True:
            try:
                code: int = await awaited(self._actor.ended.remote())
                return code, ending(code)
            except ray.exceptions.ActorUnavailableError:  # perhaps only for a while; a silent program ends otherwise
                await asyncio.sleep(AGAIN_SECONDS)
            except ray.exceptions.RayError as error:  # the actor was killed, or its machine is gone
                return None, f"is gone with its machine, or was ended ({type(error).__name__})"


class _ProcessHost:
    """Keeps one program in a bundle; the program ends with this actor."""

    def __init__(self, pass_env: Collection[str]) -> None:
        limit_environment(os.environ, pass_env)
        self._process: subprocess.Popen[bytes] | None = None

    # On the event loop and in no thread of its own, with which the kernel would end the program.
    async def start(
        self,
        module: str,
        job: tuple[str, int],
        secret: bytes,
        variables: Mapping[str, str],
        limit: MemoryLimit | None,
    ) -> tuple[int, str]:
        """Start a program, connected with the job; returns its id, and the address of this machine."""
        here: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        try:
            connection = socket.create_connection(job, timeout=CONNECT_SECONDS)
        except OSError as error:
            raise ServerFailed(f"{here} can't reach the job at {job[0]}:{job[1]}: {error}") from error
        with connection:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            environment = computing({**os.environ, **_interface(here), **variables})
            self._process = popen(("-m", module), connection, environment)
        if limit is not None:
            limit.watch(self._process.pid)
        return self._process.pid, here

    async def ended(self) -> int:
        """Wait for the end of the program, and return its exit code."""
        assert self._process is not None
        return await in_thread(self._process.wait)


def _interface(address: str) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the network interface of an address instead of guessing it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                own = socket.inet_ntoa(found[20:24])  # struct ifreq: 16 bytes of name, then a sockaddr_in
                if own == address or (own.startswith("127.") and address.startswith("127.")):
                    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}
