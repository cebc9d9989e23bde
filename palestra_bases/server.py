"""Serves one base to the jobs of several tenants, over WebSockets.

A job has one connection. Its first message identifies the job. Each later message is a call with one answer, except
that replies arrive in parts. A job's policies are freed when its connection has ended; it begins again over another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import Server, ServerConnection, serve, unix_serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from palestra.errors import ConfigError, PalestraError, Unauthorized
from palestra.process.codec import SentError
from palestra_bases.job import HostedJob, check_plain_name
from palestra_bases.protocol import (
    MOST_BYTES,
    PROTOCOL,
    REFUSED,
    TAKEN_OVER,
    Hello,
    MessageSocket,
    event,
    first,
    pack_messages,
)

if TYPE_CHECKING:
    from palestra_bases.serving import LoadedBase

HELLO_SECONDS = 20.0  # from a connection to its first message


class HostedJobs:
    """The jobs of one base server."""

    def __init__(self, base: LoadedBase, tenant_of: Callable[[str | None], str], most_policies: int = 16) -> None:
        """Begin without jobs; `listen` accepts connections."""
        self._base, self._tenant_of, self._most = base, tenant_of, most_policies
        self._jobs: dict[tuple[str, str], HostedJob] = {}
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each tenant

    @property
    def jobs(self) -> list[tuple[str, str, int]]:
        """Return tenant, name and number of policies of each present job."""
        return [(tenant, name, job.policies) for (tenant, name), job in self._jobs.items()]

    async def remove(self, tenant: str) -> None:
        """End the jobs of a tenant whose key is no longer valid, even during requests, and free their resources."""
        # A connection that was let in before the key was forgotten is there, or refused.
        async with self._opening[tenant]:
            jobs = [job for (owner, _), job in self._jobs.items() if owner == tenant]
            for job in jobs:
                await job.channel.end(REFUSED, "the key of this job is not good any more")
            await self._base.remove(tenant)
            for job in jobs:
                await self._end(job)

    @contextlib.asynccontextmanager
    async def listen(self, socket: Path | None = None, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Accept connections while the block is open, on a Unix socket or a port; yield the address for jobs."""
        options: dict[str, Any] = {
            "process_request": self._check_key,
            "max_size": MOST_BYTES,
            "compression": None,
            "server_header": None,
            "logger": _log,
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
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = first(await connection.recv(), "hello", Hello)
            job = await self._open(hello, connection)
            try:
                await job.ended()
            finally:
                await self._end(job)
        except PalestraError as error:
            with contextlib.suppress(ConnectionClosed):
                await connection.send(pack_messages(event("refused", SentError.of(error))))
            await connection.close(REFUSED, "refused")
        except (ConnectionClosed, TimeoutError):
            return

    async def _open(self, hello: Hello, connection: ServerConnection) -> HostedJob:
        """Return the job of a connection, after the end of an earlier one of the same name."""
        if hello.protocol != PROTOCOL:
            raise ConfigError(
                f"the job speaks protocol {hello.protocol!r} and this base server {PROTOCOL}; install the same version "
                "of Palestra for both"
            )
        check_plain_name(hello.job, "a job")
        assert connection.request is not None
        async with self._opening[self._tenant(connection.request)]:
            tenant = self._tenant(connection.request)  # its key may have been forgotten meanwhile
            if (before := self._jobs.get((tenant, hello.job))) is not None:
                await before.channel.end(TAKEN_OVER, "another process of this job has connected")
                await self._end(before)
            await connection.send(pack_messages(event("welcome", None)))
            job = HostedJob(self._base, tenant, hello.job, MessageSocket(connection), self._most)
            self._jobs[tenant, hello.job] = job
            return job

    async def _end(self, job: HostedJob) -> None:
        """Wait until a job's resources are freed, which begins with the end of its connection."""
        with contextlib.suppress(PalestraError):
            await job.ended()
        if self._jobs.get((job.tenant, job.name)) is job:
            del self._jobs[job.tenant, job.name]


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for the error that websockets logs when a client it refuses has stopped sending."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.msg == "unexpected internal error" and isinstance(error, AssertionError))


_log = logging.getLogger("palestra.base.socket")
_log.addFilter(_is_worth_logging)


def _url(server: Server) -> str:
    host, port = next(iter(server.sockets)).getsockname()[:2]
    return f"ws://{f'[{host}]' if ':' in host else host}:{port}"
