"""HTTP to the server of an engine: JSON, streams of server-sent events, and one class of error for what goes wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from palestra.errors import EngineFailure, InvalidRequest

CONNECT_SECONDS = 10.0
_REFUSED = (400, 404, 413, 422)  # statuses that say that the request is at fault
_OTHER_KEY = (401, 403)  # statuses that say that the key is missing or another one


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        url: without a slash at its end.
        socket: Unix socket to connect to instead of the URL's host; None: by TCP.
        key: sent as a bearer token; "": none.
    """

    url: str
    socket: Path | None = None
    key: str = ""

    def __str__(self) -> str:
        return self.url if self.socket is None else str(self.socket)


class EngineConnection:
    """Sends requests to one server. All of them come from one event loop."""

    def __init__(self, address: Address) -> None:
        """Prepare to connect; nothing is sent yet.

        Args:
            address: of the server.
        """
        self._address = address
        socket = None if address.socket is None else str(address.socket)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(
            base_url=address.url,
            headers={"authorization": f"Bearer {address.key}"} if address.key else {},
            transport=httpx2.AsyncHTTPTransport(uds=socket, limits=limits),
        )

    async def get(self, path: str, seconds: float) -> httpx2.Response:
        """Return the answer to a GET request.

        Args:
            path: of the route.
            seconds: how long the server may take.

        Raises:
            EngineFailure: there is no answer in time, or an error.
        """
        return await self._sent("GET", path, None, seconds)

    async def post(
        self, path: str, body: Mapping[str, Any], seconds: float, query: Mapping[str, str] | None = None
    ) -> Any:
        """Return the JSON of the answer to a POST request; None: the answer is empty.

        Args:
            path: of the route.
            body: sent as JSON.
            seconds: how long the server may take.
            query: parameters behind the path.

        Raises:
            InvalidRequest: the server refuses the request.
            EngineFailure: there is no answer in time, or another error.
        """
        answer = await self._sent("POST", path, body, seconds, query)
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise EngineFailure(f"{self._address}{path} answered with no JSON: {answer.text[:200]!r}") from error

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the JSON of each event of an answer, until `[DONE]`. Closing the iterator closes the connection.

        There is no limit on the time between two events: a paused engine sends none.

        Args:
            path: of the route.
            body: sent as JSON.

        Raises:
            InvalidRequest: the server refuses the request.
            EngineFailure: the stream ends without `[DONE]`, or has something else than events in it.
        """
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        try:
            async with self._http.stream("POST", path, json=body, timeout=timeout) as answer:
                if answer.is_error:
                    await answer.aread()
                self._check(path, answer)
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    if (data := line[5:].strip()) == "[DONE]":
                        return
                    yield self._event(path, data)
        except (httpx2.RequestError, httpx2.StreamError) as error:
            raise self._failure(path, error) from error
        raise EngineFailure(f"{self._address}{path}: the stream ended before the reply")

    async def close(self) -> None:
        """Close all connections; streams that are open end with EngineFailure."""
        await self._http.aclose()

    async def _sent(
        self, method: str, path: str, body: Any, seconds: float, query: Mapping[str, str] | None = None
    ) -> httpx2.Response:
        timeout = httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        try:
            answer = await self._http.request(method, path, json=body, params=query, timeout=timeout)
        except httpx2.RequestError as error:
            raise self._failure(path, error) from error
        self._check(path, answer)
        return answer

    def _failure(self, path: str, error: Exception) -> EngineFailure:
        where = f"{self._address}{path}: {type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) and self._address.socket is None:
            where += "; no server listens at engine.url: start the engine's server, or correct the address"
        return EngineFailure(where)

    def _check(self, path: str, answer: httpx2.Response) -> None:
        """Raise the error of an answer, if it is one."""
        if answer.is_success:
            return
        said = _message(answer)
        if answer.status_code in _REFUSED:
            raise InvalidRequest(f"the engine refuses this request: {said}")
        if answer.status_code in _OTHER_KEY:
            said += "; engine.key_variable has to name the variable with the key that the engine's server was given"
        raise EngineFailure(f"{self._address}{path} answered {answer.status_code}: {said}")

    def _event(self, path: str, data: str) -> Any:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise EngineFailure(f"{self._address}{path} sent an event that is no JSON: {data[:200]!r}") from error
        if isinstance(event, dict) and (refused := event.get("error")):
            # A stream has begun with 200 before the request was looked at.
            if isinstance(refused, dict) and refused.get("code") in _REFUSED:
                raise InvalidRequest(f"the engine refuses this request: {_said(event)}")
            raise EngineFailure(f"{self._address}{path}: {_said(event)}")
        return event


def _message(answer: httpx2.Response) -> str:
    """Return what a server says of an error, in one line."""
    try:
        return _said(answer.json())
    except ValueError:
        return " ".join(answer.text.split())[:300] or answer.reason_phrase


def _said(body: Any) -> str:
    """Return the message in the body of an error, which every server has in another place."""
    found = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(found, dict):
        found = found.get("message", found.get("detail", found))
    return " ".join(str(found).split())[:300]
