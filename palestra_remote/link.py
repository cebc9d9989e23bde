"""`SessionLink`: one session with an environment server, over a WebSocket; it ends with the socket."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import httpx2
import orjson
from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from palestra.client.client import drive
from palestra.client.exchange import Endpoint, checked_key, checked_url, exchange
from palestra.errors import (
    ConfigError,
    Conflict,
    ConnectionLost,
    EnvironmentFailed,
    EpisodeForfeited,
    InvalidEnvironment,
    InvalidRequest,
    NotScored,
    PalestraError,
    ProtocolMismatch,
    ServerStopping,
    TooManyRequests,
    Unauthorized,
)
from palestra.http_clients import ProxyRoutes, WebSocket, trusted
from palestra.proxies import through_proxy
from palestra_remote.observations import encoded
from palestra_remote.wire import (
    CLOSE_REFUSED,
    CLOSE_TOO_LARGE,
    MAX_MESSAGE_BYTES,
    MOST_MESSAGE_BYTES,
    PROTOCOL,
    SERVER_MESSAGE,
    EnvironmentFacts,
    Open,
    Opened,
    ServerMessage,
    SessionFailed,
)

KEY_VARIABLE = "PALESTRA_ENVIRONMENT_KEY"
EXAMPLE = "http://127.0.0.1:7500"
REQUEST_SECONDS = 10.0
_CODINGS = ("content-encoding", "content-length", "transfer-encoding")  # of the body as it came


class ServerAddress:
    """An environment server as one client knows it."""

    def __init__(self, url: str, key: str | None, retry_seconds: float, wait_seconds: float) -> None:
        """Check and store an address. `key` = None: the variable `PALESTRA_ENVIRONMENT_KEY`. `retry_seconds`: how long
        to retry while the server cannot be reached. `wait_seconds`: how long to wait for a free session.
        """
        found = key or os.environ.get(KEY_VARIABLE)
        if not found:
            raise ConfigError(f"no key of the environment server: pass key=… or set {KEY_VARIABLE}")
        self.endpoint = Endpoint(checked_url(url, EXAMPLE), checked_key(found), retry_seconds)
        self.wait_seconds = wait_seconds

    @property
    def url(self) -> str:
        """Return the server's URL, without a trailing slash."""
        return self.endpoint.url

    @property
    def session_url(self) -> str:
        """Return the URL of a session's WebSocket."""
        scheme, _, rest = self.url.partition(":")
        return f"{'wss' if scheme == 'https' else 'ws'}:{rest}/v1/session"

    def facts(self) -> EnvironmentFacts:
        """Ask the server for the facts about its environment, and wait for the answer."""
        request = {
            "method": "GET",
            "url": f"{self.url}/v1/environment",
            "headers": {"authorization": f"Bearer {self.endpoint.key}"},
            "timeout": REQUEST_SECONDS,
        }
        steps = exchange(
            self.endpoint, lambda: request, lambda reply: EnvironmentFacts.model_validate_json(reply.content)
        )
        with _BoundedClient(transport=ProxyRoutes(verify=trusted()), follow_redirects=False) as http:
            return drive(http, steps)


class _BoundedClient(httpx2.Client):
    """Holds no more than `MAX_MESSAGE_BYTES` of an answer, since the server may be a stranger's."""

    def request(self, method: str, url: Any, **settings: Any) -> httpx2.Response:
        """Return the complete answer. Raises httpx2.RequestError: the server can't be reached, or says too much."""
        body = bytearray()
        with self.stream(method, url, **settings) as answer:
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > MAX_MESSAGE_BYTES:
                    raise httpx2.DecodingError(
                        f"the answer has more than {MAX_MESSAGE_BYTES:,} bytes", request=answer.request
                    )
        headers = [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in _CODINGS]
        return httpx2.Response(answer.status_code, headers=headers, content=bytes(body), request=answer.request)


PING_SECONDS, PONG_SECONDS = 20.0, 60.0  # between two signs of life, and the longest time for an answer
OPEN_SECONDS = 900.0  # for an environment to be made; a server gives up before, and says so
CLOSE_SECONDS = 2.0  # for the server to answer that the session ends
_QUEUED = 4  # messages that a connection holds until they are read
_ERRORS: dict[str, type[PalestraError]] = {
    kind("").code: kind
    for kind in (
        Conflict, EpisodeForfeited, InvalidEnvironment, InvalidRequest, NotScored, ProtocolMismatch, TooManyRequests,
    )
} | {ServerStopping("").code: ConnectionLost}  # fmt: skip


class RemoteSessionEnded(EnvironmentFailed):
    """The session has ended: its connection was lost, its server ended it, or it was evicted for a waiting client."""


class SessionLink:
    """Sends and receives a session's messages."""

    def __init__(self, url: str, socket: ClientConnection, opened: Opened) -> None:
        self.opened = opened
        self._url, self._socket = url, socket

    async def send(self, **message: Any) -> None:
        """Send a message."""
        text = encoded(message, self.opened.max_message_bytes)
        with _explained(self._url):
            await self._socket.send(text)

    async def receive(self) -> ServerMessage:
        """Return the server's next message."""
        return await _receive(self._url, self._socket)

    async def close(self) -> None:
        """End the session."""
        await self._socket.close()


async def open_link(address: ServerAddress, system: str | None) -> SessionLink:
    """Return a new session, waiting for a free one and for the server. Raises TooManyRequests: none became free."""
    loop, endpoint = asyncio.get_running_loop(), address.endpoint
    until, attempt = math.inf, 0
    while True:
        try:
            link = await _opened(address, system)
        except ConnectionLost as error:
            if not attempt:
                until = loop.time() + endpoint.retry_seconds
            pause = endpoint.backoff(attempt)
            if loop.time() + pause > until:
                raise
            endpoint.failed(error, endpoint.retry_seconds)
            attempt += 1
            await asyncio.sleep(pause)
        else:
            endpoint.answered()
            return link


async def _opened(address: ServerAddress, system: str | None) -> SessionLink:
    url, wait = address.url, address.wait_seconds
    try:
        socket = await WebSocket(
            address.session_url,
            additional_headers={"authorization": f"Bearer {address.endpoint.key}"},
            max_size=MOST_MESSAGE_BYTES,
            max_queue=_QUEUED,
            compression=None,
            ping_interval=PING_SECONDS,
            ping_timeout=PONG_SECONDS,
            close_timeout=CLOSE_SECONDS,
        )
    except (OSError, InvalidHandshake, TimeoutError) as error:
        raise _refusal(url, error) from error
    request = Open(protocol=PROTOCOL, wait_seconds=None if math.isinf(wait) else wait, system=system)
    try:
        async with asyncio.timeout(None if math.isinf(wait) else wait + OPEN_SECONDS):
            with _explained(url):
                await socket.send(encoded(request.model_dump(), MAX_MESSAGE_BYTES))
            found = await _receive(url, socket)
        if isinstance(found, SessionFailed):
            raise server_error(found)
        if not isinstance(found, Opened):
            raise EnvironmentFailed(f"{url} does not keep to the protocol: it answered `open` with {found.type!r}")
    except BaseException as error:
        await socket.close()
        if isinstance(error, RemoteSessionEnded | TimeoutError):
            raise ConnectionLost(str(error) or f"{url} did not answer in time") from error
        raise
    return SessionLink(url, socket, found)


async def _receive(url: str, socket: ClientConnection) -> ServerMessage:
    with _explained(url):
        data = await socket.recv(decode=False)
    try:
        return SERVER_MESSAGE.validate_json(data)
    except ValidationError as error:
        raise EnvironmentFailed(f"{url} does not keep to the protocol: {error}") from error


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Raise the error that a closed connection means."""
    try:
        yield
    except ConnectionClosed as closed:
        frame = closed.rcvd or closed.sent
        said = "the connection was lost" if frame is None else frame.reason or f"closed with {frame.code}"
        for_good = frame is not None and frame.code in (CLOSE_REFUSED, CLOSE_TOO_LARGE)
        kind = EnvironmentFailed if for_good else RemoteSessionEnded
        raise kind(f"the session of {url} has ended: {said}") from closed


def server_error(message: SessionFailed) -> PalestraError:
    """Return the error of a server's message, in the server's words."""
    return _ERRORS.get(message.code, EnvironmentFailed)(message.message)


def _refusal(url: str, error: Exception) -> PalestraError:
    """Return the error of a connection that was not made; ConnectionLost: it may be made later."""
    said = str(error) or type(error).__name__
    if isinstance(error, InvalidStatus):
        status, said = error.response.status_code, _reason(bytes(error.response.body or b""))
        if status == 401:
            return Unauthorized(f"{url} refuses the key")
        if status < 500 and status not in (408, 425, 429):
            return EnvironmentFailed(f"{url} answered {status}{through_proxy(url)}: {said}")
    return ConnectionLost(f"{url} can't be reached{through_proxy(url)}: {said}")


def _reason(body: bytes) -> str:
    """Return the message of an error answer, or its beginning if it has another form."""
    try:
        return str(orjson.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
