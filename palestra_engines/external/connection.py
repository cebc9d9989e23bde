"""HTTP to an engine's server: JSON, server-sent events, one class of errors, and a check of its tokenizer."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx2

from palestra.engine.base import SAMPLE_TEXT
from palestra.errors import ConfigError, EngineFailure, EngineKeyRefused, InvalidRequest, causes_of
from palestra.http_clients import async_http_client
from palestra.proxies import through_proxy
from palestra.terminal import one_line_of

# The longest answers have a logprob, or twenty, for each token of a long prompt or reply.
MOST_BYTES = 64 * 2**20


async def read_body(answer: httpx2.Response, where: str) -> bytes:
    """Return the body of an answer."""
    found = bytearray()
    async for chunk in answer.aiter_bytes():
        found += chunk
        if len(found) > MOST_BYTES:
            raise EngineFailure(f"{where} answered with more than {MOST_BYTES:,} bytes; is it the engine's server?")
    return bytes(found)


async def read_lines(answer: httpx2.Response, where: str) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer as they arrive, without line ends."""
    parts: list[bytes] = []  # of the line that has not ended; joined once, so that a long line costs linear time
    size = 0
    async for chunk in answer.aiter_bytes():
        first, *others = chunk.split(b"\n")
        parts.append(first)
        size += len(first)
        for start in others:
            yield b"".join(parts).rstrip(b"\r")
            parts, size = [start], len(start)
        if size > MOST_BYTES:
            raise EngineFailure(f"{where} sent a line of more than {MOST_BYTES:,} bytes; is it the engine's server?")
    if size:
        yield b"".join(parts).rstrip(b"\r")


CONNECT_SECONDS = 10.0
QUICK, LOADING = 60.0, 600.0  # seconds that a route may take; those that replace weights take longest
_REFUSED = (400, 404, 413, 422)  # statuses that say that the request is at fault
_JSON = {"content-type": "application/json"}
_MARKUP = (b"<!doctype", b"<html", b"<?xml")  # pages for a browser, which say no more than the status
_REFUSES = "the engine refuses this request: "
_OTHER_KEY = (401, 403)  # statuses that say that the key is missing or another one

# Of a request: what becomes JSON, or the pieces of JSON that is made already, which are not kept once they are sent.
Body = Mapping[str, Any] | AsyncIterator[bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        socket: Unix socket to connect to instead of the URL's host; None: TCP.
        key: sent as a bearer token; "": none.
    """

    url: str
    socket: Path | None = None
    key: str = ""

    def __str__(self) -> str:
        return self.url if self.socket is None else str(self.socket)


class EngineConnection:
    """Sends requests to one server, from one event loop."""

    def __init__(self, address: Address) -> None:
        """Prepare without sending anything."""
        self._address = address
        self._http = async_http_client(
            base_url=address.url,
            headers={"authorization": f"Bearer {address.key}"} if address.key else {},
            socket=None if address.socket is None else str(address.socket),
        )

    @property
    def address(self) -> str:
        """Return where the server listens, for messages."""
        return str(self._address)

    async def get(self, path: str, seconds: float = QUICK) -> Any:
        """Return the JSON answer of a GET request; None: it is empty."""
        return self._json(path, await self._sent("GET", path, None, seconds))

    async def identify(self, path: str, program: str) -> Any:
        """Return the JSON of a route that identifies a server of the expected kind, such as `vLLM`."""
        try:
            body = await self._sent("GET", path, None, QUICK)
        except InvalidRequest as error:
            said = str(error).removeprefix(_REFUSES)
        else:
            try:
                return json.loads(body)
            except (ValueError, RecursionError):
                said = f"{_shown(body)}, which is no JSON"
        raise ConfigError(
            f"{self._address} answers, but is no {program} server (GET {path}: {said}); start {program} there as "
            "docs/how-to/vllm-server.md says, or correct engine.url"
        )

    async def get_text(self, path: str) -> str:
        """Return the text of a GET request's answer; see `get`."""
        return (await self._sent("GET", path, None, QUICK)).decode(errors="replace")

    async def post(self, path: str, body: Body, seconds: float = QUICK, query: Mapping[str, str] | None = None) -> Any:
        """Return the JSON answer of a POST request; None: it is empty. Raises InvalidRequest: the server refuses the
        request.
        """
        return self._json(path, await self._sent("POST", path, body, seconds, query))

    async def order(self, path: str, body: Mapping[str, Any], seconds: float = QUICK) -> None:
        """Send a POST request, and wait for success, ignoring the answer's text. Raises InvalidRequest: the server
        refuses the request.
        """
        await self._sent("POST", path, body, seconds)

    async def stream(self, path: str, body: Body) -> AsyncGenerator[Any, None]:
        """Yield the JSON of each event of an answer, until `[DONE]`. Closing the iterator closes the connection.

        There is no timeout between two events: a paused engine sends none. Raises InvalidRequest: the server refuses
        the request.
        """
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        try:
            async with self._http.stream("POST", path, **_sent(body), timeout=timeout) as answer:
                if not answer.is_success:
                    self._refuse(path, answer, await read_body(answer, f"{self._address}{path}"))
                async with aclosing(read_lines(answer, f"{self._address}{path}")) as lines:
                    async for line in lines:
                        if not line.startswith(b"data:"):
                            continue
                        if (data := line[5:].strip()) == b"[DONE]":
                            return
                        yield self._event(path, data)
        except (httpx2.RequestError, httpx2.StreamError) as error:
            raise self._failure(path, error) from error
        raise EngineFailure(f"{self._address}{path}: the stream ended before the reply")

    async def close(self) -> None:
        """Close all connections; open streams end with EngineFailure."""
        await self._http.aclose()

    async def _sent(
        self, method: str, path: str, body: Body | None, seconds: float, query: Mapping[str, str] | None = None
    ) -> bytes:
        """Return the body of a successful answer, completely received within the timeout."""
        timeout = httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream(method, path, **_sent(body), params=query, timeout=timeout) as answer,
            ):
                found = await read_body(answer, f"{self._address}{path}")
        except TimeoutError as error:
            raise EngineFailure(f"{self._address}{path} has not answered within {seconds:g} s") from error
        except (httpx2.RequestError, httpx2.StreamError) as error:
            raise self._failure(path, error) from error
        if not answer.is_success:
            self._refuse(path, answer, found)
        return found

    def _json(self, path: str, body: bytes) -> Any:
        try:
            return json.loads(body) if body else None
        except (ValueError, RecursionError) as error:
            raise EngineFailure(f"{self._address}{path} answered with no JSON: {_shown(body)}") from error

    def _failure(self, path: str, error: Exception) -> EngineFailure:
        where = f"{self._address}{path}: {type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) and self._address.socket is None:
            where += f"; {_remedy(error)}"
        return EngineFailure(where)

    def _refuse(self, path: str, answer: httpx2.Response, body: bytes) -> NoReturn:
        """Raise the error that an answer is."""
        if answer.status_code in _REFUSED:
            status = one_line_of(f"{answer.status_code} {answer.reason_phrase}".rstrip())
            raise InvalidRequest(f"{_REFUSES}{_message(body) or status}")
        said = _message(body) or one_line_of(answer.reason_phrase)
        proxy = "" if self._address.socket is not None else through_proxy(self._address.url)
        if answer.status_code in _OTHER_KEY:
            raise EngineKeyRefused(
                f"{self._address}{path} answered {answer.status_code}{proxy}: {said}; engine.key_variable has to name "
                "the variable with the key that the engine's server was given"
            )
        raise EngineFailure(f"{self._address}{path} answered {answer.status_code}{proxy}: {said}")

    def _event(self, path: str, data: bytes) -> Any:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EngineFailure(f"{self._address}{path} sent an event that is no JSON: {_shown(data)}") from error
        if isinstance(event, dict) and (refused := event.get("error")):
            # A stream has begun with 200 before the request was looked at.
            if isinstance(refused, dict) and refused.get("code") in _REFUSED:
                raise InvalidRequest(f"{_REFUSES}{_said(event)}")
            raise EngineFailure(f"{self._address}{path}: {_said(event)}")
        return event


def _remedy(error: Exception) -> str:
    """Return the remedy for a failed connection to a server."""
    causes = causes_of(error)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "the name of the machine in engine.url is not known here: correct it"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "the server at engine.url has no certificate that holds here, or speaks plain HTTP: is it http://?"
    return "no server listens at engine.url: start the engine's server, or correct the address"


def _sent(body: Body | None) -> dict[str, Any]:
    return {"content": body, "headers": _JSON} if isinstance(body, AsyncIterator) else {"json": body}


def _shown(body: bytes) -> str:
    """Return the beginning of a server's body, for a message."""
    return repr(one_line_of(body[:200].decode(errors="replace")))


def _message(body: bytes) -> str:
    """Return a server's error message, in one line; "": none, or an HTML page."""
    if body.lstrip()[:20].lower().startswith(_MARKUP):
        return ""
    try:
        return _said(json.loads(body))
    except (ValueError, RecursionError):
        return one_line_of(body[:1000].decode(errors="replace"))


def _said(body: Any) -> str:
    """Return the message in the body of an error, whose position differs between servers."""
    found = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(found, dict):
        found = found.get("message", found.get("detail", found))
    return one_line_of(found)


OTHER_MODEL = "start it with the policy's model, or correct engine.url or the policy's model"  # what to do


@dataclass(frozen=True, slots=True)
class SampleText:
    """A text, and its tokens in the policy's tokenizer.

    Attributes:
        ids: without special tokens.
    """

    text: str
    ids: tuple[int, ...]


def tokenized(tokenizer: Any) -> SampleText:
    """Return the sample text with the tokens of a transformers tokenizer."""
    return SampleText(SAMPLE_TEXT, tuple(map(int, tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False))))


async def check_tokenizer(http: EngineConnection, sample: SampleText) -> None:
    """Compare a server's tokens of the sample text; vLLM and SGLang have the same route for that."""
    try:
        found = await http.post("/tokenize", {"prompt": sample.text, "add_special_tokens": False})
    except InvalidRequest:
        return  # a server that was started without a tokenizer, which can't be another one
    said = found.get("tokens") if isinstance(found, dict) else None
    if said != list(sample.ids):
        shown = f"{len(said)} other tokens" if isinstance(said, list) else "no tokens"
        raise ConfigError(
            f"the engine's server has another tokenizer than the policy's model: it makes {shown} of a text of "
            f"{len(sample.ids)}; {OTHER_MODEL}"
        )


async def check_vocabulary(ask: Callable[[int], Awaitable[None]], size: int) -> None:
    """Ask a server to continue the last token id of the policy's model, which it must accept, and the next, which it
    must refuse. `ask` sends a token id; `size` is that of the model's vocabulary.
    """
    try:
        await ask(size - 1)
    except InvalidRequest as error:
        raise ConfigError(
            f"the engine's server has another vocabulary than the policy's model ({error}); {OTHER_MODEL}"
        ) from error
    try:
        await ask(size)
    except InvalidRequest:
        return
    raise ConfigError(f"the engine's server has more tokens than the {size} of the policy's model; {OTHER_MODEL}")
