"""Serves one base to the jobs of several tenants, over WebSockets.

A job has one connection. Its first message identifies the job and its process. Each later message is a call with one
answer, except that replies arrive in parts. After a lost connection, a job's policies are kept for a lease time, during
which the same process may reconnect; repeated calls are not executed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve, unix_serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from palestra.errors import ConfigError, PalestraError, Unauthorized
from palestra.process.channel import Event
from palestra.threads import in_thread
from palestra.waiting import cancelled
from palestra_bases.base import SharedBase
from palestra_bases.job import HostedJob, check_plain_name
from palestra_bases.job_channel import Outbox
from palestra_bases.protocol import (
    MOST_BYTES,
    MOST_VALUES,
    PROTOCOL,
    REFUSED,
    TAKEN_OVER,
    Hello,
    Welcome,
    event,
    first,
    pack_messages,
    pack_refusal,
    unpack_messages,
)

log = logging.getLogger("palestra.base")
HELLO_SECONDS = 20.0  # from a connection to its first message


class HostedJobs:
    """The jobs of one base server."""

    def __init__(
        self,
        base: SharedBase,
        tenant_of: Callable[[str | None], str],
        lease_seconds: float = 60.0,
        most_policies: int = 16,
    ) -> None:
        """Begin without jobs; `listen` accepts connections. `lease_seconds`: how long a disconnected job keeps its
        policies.
        """
        self._base, self._tenant_of = base, tenant_of
        self._lease_seconds, self._most = lease_seconds, most_policies
        self._jobs: dict[tuple[str, str], HostedJob] = {}
        self._connections: dict[HostedJob, ServerConnection] = {}
        self._leases: dict[HostedJob, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each tenant

    @property
    def jobs(self) -> list[tuple[str, str, int]]:
        """Return tenant, name and number of policies of each present job."""
        return [(tenant, name, job.policies) for (tenant, name), job in self._jobs.items()]

    async def remove(self, tenant: str) -> None:
        """End the jobs of a tenant whose key is no longer valid, even during requests, and free their resources."""
        async with self._opening[
            tenant
        ]:  # a connection that was let in before the key was forgotten is there, or refused
            jobs = [job for (owner, _), job in self._jobs.items() if owner == tenant]
            for job in jobs:
                if (connection := self._connections.get(job)) is not None:
                    await connection.close(REFUSED, "the key of this job is not good any more")
            await self._base.remove(tenant)
            for job in jobs:
                await self._end(job)

    @contextlib.asynccontextmanager
    async def listen(self, socket: Path | None = None, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Accept connections while the block is open, and yield the address for jobs. `socket`: path of a Unix socket;
        None: use `host` and `port`.
        """
        options: dict[str, Any] = {
            "process_request": self._check_key,
            "max_size": MOST_BYTES,
            "compression": None,
            "server_header": None,
            "logger": logging.getLogger("palestra.base.socket"),
        }
        try:
            if socket is not None:
                server = await unix_serve(self._handle, socket, **options)
                os.chmod(socket, 0o600)
            else:
                server = await serve(self._handle, host, port, **options)
        except OSError as error:
            raise ConfigError(
                f"{socket or f'{host}:{port}'} can't be listened on ({error.strerror or error}); choose another"
            ) from error
        try:
            yield f"unix:{socket}" if socket is not None else _url(server)
        finally:
            server.close()
            await server.wait_closed()
            for lease in self._leases.values():
                lease.cancel()
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _check_key(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse a connection without a good key, before it can send a message."""
        try:
            self._tenant(request)
        except Unauthorized as error:
            return connection.respond(HTTPStatus.UNAUTHORIZED, str(error))
        return None

    def _tenant(self, request: Request) -> str:
        given = request.headers.get_all("authorization")
        scheme, _, key = (given[0] if len(given) == 1 else "").partition(" ")
        return self._tenant_of(key if scheme.lower() == "bearer" else None)

    # One connection

    async def _handle(self, connection: ServerConnection) -> None:
        """Serve a connection until it ends."""
        assert connection.request is not None
        job: HostedJob | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = first(await connection.recv(), "hello", Hello)
            tenant = self._tenant(connection.request)
            async with self._opening[tenant]:
                job, outbox = await self._open(self._tenant(connection.request), hello, connection)
            await self._serve(job, outbox, connection)
        except PalestraError as error:
            with contextlib.suppress(ConnectionClosed):
                await connection.send(pack_refusal(error))
            await connection.close(REFUSED, "refused")
        except (ConnectionClosed, TimeoutError):
            return
        finally:
            if job is not None and self._connections.get(job) is connection:
                self._left(job)

    async def _open(self, tenant: str, hello: Hello, connection: ServerConnection) -> tuple[HostedJob, Outbox]:
        """Return the job of a connection, and what is sent over it after the answer to its first message."""
        if hello.protocol != PROTOCOL:
            raise ConfigError(
                f"the job speaks protocol {hello.protocol!r} and this base server {PROTOCOL}; install the same version "
                "of Palestra for both"
            )
        name, process = hello.job, hello.process
        check_plain_name(name, "a job")
        job = self._jobs.get((tenant, name))
        known = job is not None and job.process == process
        if job is not None:
            before = self._connections.pop(job, None)
            if before is not None:
                await before.close(TAKEN_OVER, "another process of this job has connected")
            if not known:
                await self._end(job)
        if job is None or not known:
            job = self._jobs[tenant, name] = HostedJob(self._base, tenant, name, process, self._most)
        if (lease := self._leases.pop(job, None)) is not None:
            lease.cancel()
        self._connections[job] = connection
        outbox = job.channel.attach(set(hello.waiting))
        job.say_versions()
        try:
            await connection.send(pack_messages(event("welcome", Welcome(known=known, most_bytes=MOST_BYTES))))
        except BaseException:  # the client has gone: its lease begins
            self._left(job)
            raise
        return job, outbox

    async def _serve(self, job: HostedJob, outbox: Outbox, connection: ServerConnection) -> None:
        """Hand over messages until the connection ends, or the job says goodbye."""
        sending = asyncio.create_task(_send_all(outbox, connection))
        try:
            async for data in connection:
                for message in (
                    await in_thread(partial(unpack_messages, data))
                    if len(data) > MOST_VALUES
                    else unpack_messages(data)
                ):
                    if isinstance(message, Event) and message.name == "goodbye":
                        await self._end_alone(job, connection)
                        return
                    await outbox.drain()
                    if self._connections.get(job) is connection:
                        job.channel.take(message)
        finally:
            with contextlib.suppress(ConnectionClosed):
                await cancelled(sending)

    # Leases

    def _left(self, job: HostedJob) -> None:
        """Keep a disconnected job's policies for the lease time."""
        del self._connections[job]
        job.channel.detach()
        self._leases[job] = asyncio.get_running_loop().call_later(self._lease_seconds, self._expire, job)

    def _expire(self, job: HostedJob) -> None:
        if job.policies:
            log.warning("job %s of %s did not come back; its policies are freed", job.name, job.tenant)
        task = asyncio.create_task(self._end_alone(job, None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end_alone(self, job: HostedJob, connection: ServerConnection | None) -> None:
        """Free a job's resources unless it has reconnected; meanwhile no connection is accepted."""
        async with self._opening[job.tenant]:
            if self._connections.get(job) is connection:
                await self._end(job)

    async def _end(self, job: HostedJob) -> None:
        """Free a job's resources."""
        self._connections.pop(job, None)
        if (lease := self._leases.pop(job, None)) is not None:
            lease.cancel()
        if self._jobs.get((job.tenant, job.name)) is job:
            del self._jobs[job.tenant, job.name]
        await job.close()


async def _send_all(outbox: Outbox, connection: ServerConnection) -> None:
    """Send messages; those that are there at the same time in one, up to a bound."""
    try:
        while True:
            await connection.send(pack_messages(*await outbox.take()))
    finally:
        outbox.close()


def _url(server: Server) -> str:
    host, port = next(iter(server.sockets)).getsockname()[:2]
    return f"ws://{f'[{host}]' if ':' in host else host}:{port}"
