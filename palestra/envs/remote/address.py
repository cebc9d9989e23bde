"""Where an environment server is, and the requests to it that are no messages of a session."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

import httpx2

from palestra.client.async_client import drive_async
from palestra.client.client import drive
from palestra.client.exchange import Endpoint, checked_key, checked_url, exchange
from palestra.envs.remote.bounded import BoundedAsyncClient, BoundedClient
from palestra.errors import ConfigError, TooManyRequests
from palestra.types.env_wire import (
    MAX_WAIT_SECONDS,
    PROTOCOLS,
    CreateSession,
    EnvironmentFacts,
    SessionAnswer,
    SessionCreated,
)

KEY_VARIABLE = "PALESTRA_ENVIRONMENT_KEY"
EXAMPLE = "http://127.0.0.1:7500"
REQUEST_SECONDS = 10.0  # of a request, beside the time for which it asks the server to wait


class ServerAddress:
    """An environment server as one client knows it."""

    def __init__(self, url: str, key: str | None, retry_seconds: float, wait_seconds: float) -> None:
        """Check and keep an address.

        Args:
            key: of the server; None: the variable `PALESTRA_ENVIRONMENT_KEY`.
            retry_seconds: how long to try again while the server can't be reached.
            wait_seconds: how long to wait for a session while all are in use.

        Raises:
            ConfigError: the URL is no URL, there is no key, or a number is no time.
        """
        found = key or os.environ.get(KEY_VARIABLE)
        if not found:
            raise ConfigError(f"no key of the environment server: pass key=… or set {KEY_VARIABLE}")
        self.endpoint = Endpoint(checked_url(url, EXAMPLE), checked_key(found), retry_seconds)
        self.wait_seconds = wait_seconds

    @property
    def url(self) -> str:
        """Return the server's URL, without a slash at its end."""
        return self.endpoint.url

    def stream_url(self, session_id: str, received: int) -> str:
        """Return the URL of a session's WebSocket.

        Args:
            received: number of the last message that the client has.
        """
        scheme, _, rest = self.url.partition(":")
        return f"{'wss' if scheme == 'https' else 'ws'}:{rest}/v1/sessions/{session_id}/stream?received={received}"

    def facts(self) -> EnvironmentFacts:
        """Ask the server what is known of its environment before an episode, and wait for the answer.

        Raises:
            PalestraError: the server refuses the key, or can't be reached.
        """
        steps = exchange(
            self.endpoint,
            lambda: self._request("GET", "/v1/environment", REQUEST_SECONDS),
            lambda reply: EnvironmentFacts.model_validate_json(reply.content),
        )
        with BoundedClient() as http:
            return drive(http, steps)

    async def create(self, system: str | None) -> SessionCreated:
        """Get a session, and wait for one while all are in use.

        Args:
            system: system message of the agent; None: the environment's own.

        Raises:
            TooManyRequests: none has become free in `wait_seconds`.
            PalestraError: the server refuses the request, or can't be reached.
        """
        loop = asyncio.get_running_loop()
        until, request_id = loop.time() + self.wait_seconds, uuid.uuid4().hex
        async with BoundedAsyncClient() as http:
            while True:
                wait = max(0.0, min(MAX_WAIT_SECONDS, until - loop.time()))
                request = CreateSession(request_id=request_id, protocols=PROTOCOLS, wait_seconds=wait, system=system)
                answer = await self._send(http, request.model_dump_json(), wait + REQUEST_SECONDS)
                if answer.session is not None:
                    return answer.session
                if loop.time() >= until:
                    raise TooManyRequests(
                        f"all sessions of {self.url} are in use, and none has become free in {self.wait_seconds:g} s; "
                        "play fewer episodes at the same time, or let its operator allow more"
                    )

    async def _send(self, http: httpx2.AsyncClient, body: str, timeout_seconds: float) -> SessionAnswer:
        """Send the request for a session until the server answers it."""
        steps = exchange(
            self.endpoint,
            lambda: self._request("POST", "/v1/sessions", timeout_seconds, body),
            lambda reply: SessionAnswer.model_validate_json(reply.content),
        )
        return await drive_async(http, steps)

    def _request(self, method: str, path: str, timeout_seconds: float, body: str | None = None) -> dict[str, Any]:
        """Return the arguments of a request, for `httpx2.Client.request`."""
        headers = {"authorization": f"Bearer {self.endpoint.key}", "content-type": "application/json"}
        return {
            "method": method,
            "url": self.url + path,
            "content": body,
            "headers": headers,
            "timeout": timeout_seconds,
        }
