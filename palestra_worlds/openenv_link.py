"""`OpenEnvLink`: one session with a server of OpenEnv, over its WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from typing import Any

import httpx2
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from palestra.errors import EnvironmentFailed, TooManyRequests
from palestra.http_clients import WebSocket, async_http_client, trusted
from palestra.proxies import through_proxy

CONNECT_SECONDS, PING_SECONDS, CLOSE_SECONDS = 10.0, 20.0, 2.0
_FULL_PAUSE_SECONDS = 0.5  # until a server whose sessions are all in use is asked again
_FULL, INVALID_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"


class OpenEnvError(Exception):
    """The server has answered a message with an error.

    Attributes:
        code: OpenEnv's name of the kind of error.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})" if code else message)
        self.code = code


class SessionLost(EnvironmentFailed):
    """The session has ended while a message waited for its answer."""


class OpenEnvLink:
    """A connection, which is a session: the server's environment ends with it."""

    def __init__(
        self, url: str, headers: Mapping[str, str], wait_seconds: float, reply_seconds: float, max_message_bytes: int
    ) -> None:
        """Store the address; `open` connects.

        Args:
            wait_seconds: how long to wait while all sessions are in use.
            reply_seconds: limit for the answer to one message.
            max_message_bytes: limit of one message of the server.
        """
        self._url, self._headers = url, dict(headers)
        self._wait_seconds, self._reply_seconds = wait_seconds, reply_seconds
        self._max_bytes = max_message_bytes
        self._socket: ClientConnection | None = None

    @property
    def is_open(self) -> bool:
        """Return whether there is a connection, as far as known."""
        return self._socket is not None

    async def schema(self) -> dict[str, Any]:
        """Return the JSON schemas of actions and observations."""
        limits = httpx2.Timeout(CONNECT_SECONDS)
        try:
            async with (
                async_http_client(timeout=limits, verify=trusted(), follow_redirects=False) as http,
                http.stream("GET", f"{self._url}/schema", headers=self._headers) as answer,
            ):
                body = b""
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise EnvironmentFailed(f"the schema of {self._url} has more than {self._max_bytes:,} bytes")
        except httpx2.HTTPError as error:
            raise EnvironmentFailed(
                f"no OpenEnv server can be reached at {self._url}: {str(error) or type(error).__name__}"
            ) from error
        try:
            found = json.loads(body) if answer.status_code == 200 else None
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("action"), dict):
            raise EnvironmentFailed(
                f"{self._url}/schema answers {answer.status_code}{through_proxy(self._url)}, and no schema of actions: "
                "this is no OpenEnv server"
            )
        return found

    async def open(self) -> None:
        """Connect, unless connected, waiting while all sessions are in use.

        Raises:
            EnvironmentFailed: the server can't be reached.
            TooManyRequests: no session became free in time.
        """
        until = asyncio.get_running_loop().time() + self._wait_seconds
        while self._socket is None:
            await self._connect()
            try:
                # A server without a free session says so instead of an answer, and hangs up.
                await self.ask({"type": "state"})
            except OpenEnvError as error:
                if error.code != _FULL:
                    return  # the server is there; what it objects to is of the message
                await self.close()
                if asyncio.get_running_loop().time() >= until:
                    raise TooManyRequests(
                        f"all sessions of {self._url} are in use, and none has become free in {self._wait_seconds:g} s;"
                        " play fewer episodes at the same time, or start the server with more `max_concurrent_envs`"
                    ) from error
                await asyncio.sleep(_FULL_PAUSE_SECONDS)

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raises:
            OpenEnvError: the server answers with an error.
            SessionLost: the connection is lost, or a timeout; the session has ended.
            EnvironmentFailed: there is no session, or the answer is invalid.
        """
        socket = self._socket
        if socket is None:
            raise EnvironmentFailed(f"there is no connection to {self._url}")
        try:
            async with asyncio.timeout(self._reply_seconds):
                with contextlib.suppress(ConnectionClosed):  # a server that has hung up may have said why before
                    await socket.send(json.dumps(message))
                text = await socket.recv()
        except TimeoutError:
            await self.close()
            raise SessionLost(f"{self._url} did not answer within {self._reply_seconds:g} s") from None
        except ConnectionClosed as error:
            await self.close()
            raise SessionLost(f"the connection to {self._url} was lost: {error}") from error
        except asyncio.CancelledError:
            await self.close()  # an answer that comes later would be taken for that to the next message
            raise
        try:
            answer = json.loads(text)
            kind, data = answer["type"], answer["data"]
        except (ValueError, TypeError, KeyError):
            kind, data = None, None
        if not isinstance(data, dict):
            await self.close()
            raise EnvironmentFailed(f"{self._url} has sent what is no message of OpenEnv: {text[:80]!r}")
        if kind == "error":
            raise OpenEnvError(str(data.get("code", "")), str(data.get("message", "it does not say why"))[:2000])
        return data

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await socket.send(json.dumps({"type": "close"}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await socket.close()

    async def _connect(self) -> None:
        scheme, _, rest = self._url.partition(":")
        secure: ssl.SSLContext | None = trusted() if scheme == "https" else None
        try:
            self._socket = await WebSocket(
                f"{'wss' if scheme == 'https' else 'ws'}:{rest}/ws",
                additional_headers=self._headers,
                open_timeout=CONNECT_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=PING_SECONDS,
                close_timeout=CLOSE_SECONDS,
                max_size=self._max_bytes,
                ssl=secure,
            )
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise EnvironmentFailed(
                f"no session of OpenEnv at {self._url}{through_proxy(self._url)}: {str(error) or type(error).__name__}"
            ) from error
