"""The address of an environment server, and the facts about its environment."""

from __future__ import annotations

import os
from typing import Any

import httpx2

from palestra.client.client import drive
from palestra.client.exchange import Endpoint, checked_key, checked_url, exchange
from palestra.errors import ConfigError
from palestra.http_clients import ProxyRoutes, trusted
from palestra.types.env_wire import MAX_MESSAGE_BYTES, EnvironmentFacts

KEY_VARIABLE = "PALESTRA_ENVIRONMENT_KEY"
EXAMPLE = "http://127.0.0.1:7500"
REQUEST_SECONDS = 10.0
_CODINGS = ("content-encoding", "content-length", "transfer-encoding")  # of the body as it came


class ServerAddress:
    """An environment server as one client knows it."""

    def __init__(self, url: str, key: str | None, retry_seconds: float, wait_seconds: float) -> None:
        """Check and store an address.

        Args:
            key: None: the variable `PALESTRA_ENVIRONMENT_KEY`.
            retry_seconds: how long to retry while the server can't be reached.
            wait_seconds: how long to wait for a free session.
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
        """Return the complete answer.

        Raises:
            httpx2.RequestError: the server can't be reached, or its answer is too long.
        """
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
