"""HTTP clients that hold no more of an answer than a bound: for servers that are another's."""

from __future__ import annotations

from typing import Any

import httpx2

from palestra.http_clients import AsyncProxyRoutes, ProxyRoutes, trusted
from palestra.types.env_wire import FRAME_BYTES, MAX_MESSAGE_BYTES

MOST_BYTES = MAX_MESSAGE_BYTES + FRAME_BYTES  # of an answer
_CODINGS = ("content-encoding", "content-length", "transfer-encoding")  # of the body as it came


class BoundedClient(httpx2.Client):
    """Makes requests whose answers are at most `MOST_BYTES` long, and follows no redirect."""

    def __init__(self) -> None:
        super().__init__(transport=ProxyRoutes(verify=trusted()), follow_redirects=False)

    def request(self, method: str, url: Any, **settings: Any) -> httpx2.Response:
        """Return the answer, read to its end.

        Raises:
            httpx2.RequestError: the server can't be reached, or its answer is too long.
        """
        found = bytearray()
        with self.stream(method, url, **settings) as answer:
            for chunk in answer.iter_bytes():
                _add(found, chunk, answer)
        return _whole(answer, found)


class BoundedAsyncClient(httpx2.AsyncClient):
    """`BoundedClient` for an event loop."""

    def __init__(self) -> None:
        super().__init__(transport=AsyncProxyRoutes(verify=trusted()), follow_redirects=False)

    async def request(self, method: str, url: Any, **settings: Any) -> httpx2.Response:
        """Return the answer, read to its end; see `BoundedClient.request`."""
        found = bytearray()
        async with self.stream(method, url, **settings) as answer:
            async for chunk in answer.aiter_bytes():
                _add(found, chunk, answer)
        return _whole(answer, found)


def _add(found: bytearray, chunk: bytes, answer: httpx2.Response) -> None:
    found += chunk
    if len(found) > MOST_BYTES:
        raise httpx2.DecodingError(f"the answer has more than {MOST_BYTES:,} bytes", request=answer.request)


def _whole(answer: httpx2.Response, body: bytearray) -> httpx2.Response:
    headers = [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in _CODINGS]
    return httpx2.Response(answer.status_code, headers=headers, content=bytes(body), request=answer.request)
