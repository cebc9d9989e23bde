"""Clients of HTTP servers and WebSockets: the only module that makes them, so that all treat proxies alike."""

from __future__ import annotations

import contextlib
import functools
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.request import getproxies

import httpx2
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidProxy
from websockets.proxy import parse_proxy

from palestra.errors import ConfigError
from palestra.proxies import proxy_note, proxy_of

REQUESTS_OF_A_POOL = 8  # 96 requests at a time take a third less CPU than in one pool, 512 less than half of it
IDLE_SECONDS = 5.0  # after which an idle connection is closed
_OF_THREADS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)


@functools.cache
def trusted() -> ssl.SSLContext:
    """Return the system's certificates, read once: reading them takes longer than a request."""
    return ssl.create_default_context()


@functools.cache
def _usual() -> ssl.SSLContext:
    """Return what clients trust by default, read once for all pools."""
    return httpx2.create_ssl_context()


def http_client(*, transport: httpx2.BaseTransport | None = None, **settings: Any) -> httpx2.Client:
    """Return a client that uses the environment's proxy, except for this machine.

    Args:
        transport: replaces the usual one, for example with a Unix socket.
    """
    return httpx2.Client(transport=transport or ProxyRoutes(**settings), **settings)


def async_http_client(*, socket: str | None = None, **settings: Any) -> httpx2.AsyncClient:
    """Return `http_client` for an event loop, which opens as many connections as there are requests at a time.

    Args:
        socket: path of the Unix socket at which the server listens.
    """
    return httpx2.AsyncClient(transport=AsyncProxyRoutes(socket=socket, **settings), **settings)


class WebSocket(connect):
    """Opens a WebSocket, through a proxy like HTTP clients; follows no redirect, which could lead to another host."""

    def __init__(self, url: str, **settings: Any) -> None:
        """Prepare to connect."""
        proxy = proxy_of(url)
        if proxy is not None:
            try:
                known = parse_proxy(proxy).scheme in ("http", "https")
            except InvalidProxy as error:
                raise ConfigError(f"no WebSocket can be opened{proxy_note(proxy)}: {error}") from error
            if not known:
                raise ConfigError(f"no WebSocket can be opened{proxy_note(proxy)}; it has to speak HTTP")
        super().__init__(url, proxy=proxy, **settings)

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Return the redirect as a failure (called by websockets)."""
        return exc


class ProxyRoutes(httpx2.BaseTransport):
    """A connection pool for each proxy, and one without."""

    def __init__(self, **settings: Any) -> None:
        """Take `verify` of a client's settings."""
        self._settings, self._proxies = _of_transport(settings), getproxies()
        self._pools: dict[str | None, httpx2.HTTPTransport] = {}

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request by its pool (called by the client)."""
        proxy = proxy_of(str(request.url), self._proxies)
        with _explained(proxy):
            if (pool := self._pools.get(proxy)) is None:
                pool = self._pools.setdefault(
                    proxy, httpx2.HTTPTransport(proxy=proxy, limits=_OF_THREADS, **self._settings)
                )
            return pool.handle_request(request)

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()


class AsyncProxyRoutes(httpx2.AsyncBaseTransport):
    """Connection pools for each proxy, and without one.

    A pool asks the system about each of its idle connections at each request, twice. So it gets few requests at a time,
    and the next ones go to another pool. A pool that nobody has needed for a while is closed.
    """

    def __init__(self, *, socket: str | None = None, **settings: Any) -> None:
        """Take `verify` of a client's settings; `socket`: see `async_http_client`."""
        self._settings, self._proxies, self._socket = _of_transport(settings), getproxies(), socket
        self._pools: dict[str | None, list[_Pool]] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request by a pool (called by the client)."""
        proxy = None if self._socket is not None else proxy_of(str(request.url), self._proxies)
        with _explained(proxy):
            pools = self._pools.setdefault(proxy, [])
            pool = next((pool for pool in pools if pool.requests < REQUESTS_OF_A_POOL), None)
            if pool is None:
                pools.append(pool := self._new_pool(proxy))
            elif pools[-1] is not pool and pools[-1].is_unused:  # the first ones are taken first
                await pools.pop().transport.aclose()
            return await pool.send(request)

    def _new_pool(self, proxy: str | None) -> _Pool:
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=REQUESTS_OF_A_POOL, keepalive_expiry=IDLE_SECONDS
        )
        return _Pool(httpx2.AsyncHTTPTransport(proxy=proxy, uds=self._socket, limits=limits, **self._settings))

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in [pool for pools in self._pools.values() for pool in pools]:
            await pool.transport.aclose()


class _Pool:
    """Connections, and the number of requests whose answers are not read to their ends."""

    def __init__(self, transport: httpx2.AsyncHTTPTransport) -> None:
        self.transport, self.requests, self._needed_at = transport, 0, 0.0

    @property
    def is_unused(self) -> bool:
        """Return whether nobody has needed a connection for so long that all idle ones are to be closed."""
        return not self.requests and time.monotonic() - self._needed_at > IDLE_SECONDS

    async def send(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; it counts until its answer is closed."""
        self.requests += 1
        try:
            response = await self.transport.handle_async_request(request)
        except BaseException:
            self.end_request()
            raise
        response.stream = _Counted(response.stream, self)
        return response

    def end_request(self) -> None:
        """Count a request that is over."""
        self.requests, self._needed_at = self.requests - 1, time.monotonic()


class _Counted(httpx2.AsyncByteStream):
    """The body of an answer, whose end is the end of its request."""

    def __init__(self, body: Any, pool: _Pool) -> None:
        self._body, self._pool = body, pool

    def __aiter__(self) -> AsyncIterator[bytes]:
        iterator: AsyncIterator[bytes] = self._body.__aiter__()
        return iterator

    async def aclose(self) -> None:
        """Close the body, once (called by the client)."""
        body, self._body = self._body, None
        if body is not None:
            try:
                await body.aclose()
            finally:
                self._pool.end_request()


def _of_transport(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a client's settings for its transport."""
    return {"verify": settings["verify"] if "verify" in settings else _usual()}


@contextlib.contextmanager
def _explained(proxy: str | None) -> Iterator[None]:
    """Name the proxy in an error of a request."""
    try:
        yield
    except httpx2.RequestError as error:
        if proxy is not None:
            error.args = (f"{str(error) or type(error).__name__}{proxy_note(proxy)}",)
        raise
    except ImportError as error:
        raise ConfigError(f"no server can be asked{proxy_note(proxy or '')}: {error}") from error
