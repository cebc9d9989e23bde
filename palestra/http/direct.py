"""Routes that are in FastAPI's document, and are answered without its work, and Starlette's, for each request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response | BaseModel]]


class Direct(Request):
    """A request whose headers are a dict, by names in lower case, and whose body is read before its endpoint runs."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        pairs = reversed(scope["headers"])  # the first of two headers with one name counts
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}  # type: ignore[assignment]

    async def take(self, receive: Receive) -> None:
        """Read the body.

        Raises:
            ClientDisconnect: the client closed the connection.
        """
        message = await receive()
        found = [message.get("body", b"")]
        while message.get("more_body"):
            message = await receive()
            found.append(message.get("body", b""))
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self._body = b"".join(found)


class JsonAnswer(Response):
    """An answer of bytes that are JSON."""

    def __init__(self, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:  # Starlette's does more
        self.body, self.status_code, self.background = body, 200, None
        size = b"%d" % len(body)
        self.raw_headers = [*headers, (b"content-length", size), (b"content-type", b"application/json")]


def json_bytes(model: BaseModel) -> bytes:
    """Return a model as JSON."""
    return model.model_dump_json(by_alias=True).encode()
