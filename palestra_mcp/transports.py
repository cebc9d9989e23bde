"""MCP over standard input and output, a process of our own with a message a line; and over streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import httpx2
import orjson

from palestra.errors import EnvironmentFailed
from palestra.http_clients import async_http_client, trusted
from palestra.process.child import kept_command, kept_ending
from palestra.proxies import through_proxy
from palestra.waiting import cancelled
from palestra_mcp.connection import Message, Transport

# What a server's process gets of the environment of this one, which may hold keys.
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
EXIT_SECONDS = 1.0  # for the server to end by itself when its input is closed
_KILLED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
KEPT_BYTES = 2_000  # of what the server wrote to standard error, for the message that it has ended
STDERR_SECONDS = 0.01  # after each look at standard error: a server that writes without a pause takes no core of ours


class StdioTransport(Transport):
    """A server started here; its process group ends with this process, however that ends."""

    ended_by_itself = True

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], folder: Path | None, max_message_bytes: int
    ) -> None:
        """Store the command; `start` runs it. `folder` is the server's working directory; None: this process's."""
        self.where = f"the MCP server `{' '.join(command)}`"
        self._command, self._variables, self._folder = command, variables, folder
        self._max_bytes = max_message_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._said = b""

    async def start(self, receive: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Run the command and read its output."""
        ours = {name: os.environ[name] for name in INHERITED if name in os.environ}
        theirs, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *kept_command(theirs, GRACE_SECONDS, self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=self._max_bytes,
                env={**ours, **self._variables},
                cwd=self._folder,
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C at a terminal is for Palestra, which then ends the server
            )
        except OSError as error:
            self._hang_up()
            raise EnvironmentFailed(f"{self.where} can't be started: {error.strerror}") from error
        finally:
            os.close(theirs)
        self._reading = [
            asyncio.create_task(self._read(self._process, receive, lost)),
            asyncio.create_task(self._listen(self._process)),
        ]

    async def send(self, message: Message) -> None:
        """Write a line."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(orjson.dumps(message) + b"\n")
            await process.stdin.drain()
        except (OSError, RuntimeError) as error:  # a pipe without a reader, or one that is closed
            raise EnvironmentFailed(await self._how_ended(process)) from error

    async def close(self) -> None:
        """Close the server's input, wait a little, then end its process group."""
        process = self._process
        if process is None:
            return
        self._process = None
        try:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await process.wait()
        finally:
            self._hang_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * GRACE_SECONDS):
                    await process.wait()
                    await asyncio.wait(self._reading)  # until the pipes end
            await cancelled(*self._reading)
            # Closes the pipes that a process has kept which left the group. asyncio has no public way.
            process._transport.close()  # type: ignore[attr-defined]

    def _hang_up(self) -> None:
        """Close the pipe that the keeper watches."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def _read(
        self,
        process: asyncio.subprocess.Process,
        receive: Callable[[Message], None],
        lost: Callable[[str], None],
    ) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                if isinstance(message := orjson.loads(line) if line.strip() else {}, dict):
                    receive(message)
        except EnvironmentFailed:  # the session is lost
            pass
        except orjson.JSONDecodeError:
            lost(f"{self.where} writes to standard output what is no message of MCP: {line[:80]!r}")
        except ValueError:  # what `readline` raises over its limit
            lost(f"{self.where} has sent a message of more than {self._max_bytes:,} bytes")
        else:
            lost(await self._how_ended(process))
        self._hang_up()  # nothing that it writes is read any more

    async def _how_ended(self, process: asyncio.subprocess.Process) -> str:
        """Describe how a server with a closed pipe has ended, with the end of its output."""
        ending, how = asyncio.ensure_future(process.wait()), "has ended"
        await asyncio.wait((ending, *self._reading[1:]), timeout=EXIT_SECONDS, return_when=asyncio.ALL_COMPLETED)
        if ending.done():
            how = kept_ending(ending.result())
            self.ended_by_itself = ending.result() not in _KILLED
        await cancelled(ending)
        return f"{self.where} {how}{self._last_words()}"

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read standard error, so that the server never waits for it, and keep the end."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(65_536):
            self._said = (self._said + chunk)[-KEPT_BYTES:]
            await asyncio.sleep(STDERR_SECONDS)

    def _last_words(self) -> str:
        lines = self._said.decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()[:300]}" if lines else ""


CONNECT_SECONDS, CLOSE_SECONDS = 10.0, 5.0
LISTEN_AGAIN_SECONDS = 1.0  # until the stream of announcements is asked for again when it has ended
log = logging.getLogger("palestra.tools")
_SESSION, _PROTOCOL = "mcp-session-id", "mcp-protocol-version"
_ACCEPTED = "application/json, text/event-stream"
_HINTS = {
    401: "it wants a key: give it with headers={'Authorization': 'Bearer …'}",
    403: "it wants another key, or does not serve this host; see `headers`",
    404: "it has no MCP server at this path, which is /mcp at most servers",
    405: "what is at this path is no MCP server over streamable HTTP",
    421: "it does not serve this host name; see its list of allowed hosts",
}


class HttpTransport(Transport):
    """A server at a URL. Redirects are not followed, so that no server can send a request to another one."""

    def __init__(self, url: str, headers: Mapping[str, str], max_message_bytes: int) -> None:
        """Store the address; the first message connects."""
        self.where = f"the MCP server at {url}"
        self._url, self._max_bytes = url, max_message_bytes
        self._headers = {"accept": _ACCEPTED, "content-type": "application/json", **headers}
        self._client: httpx2.AsyncClient | None = None
        self._listening: asyncio.Task[None] | None = None
        self._lost: Callable[[str], None] = lambda reason: None

    async def start(self, receive: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Create the client."""
        self._receive, self._lost = receive, lost
        # Calls may take long, so that reading has no limit here: who sends a request has one.
        limits = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        self._client = async_http_client(timeout=limits, verify=trusted(), follow_redirects=False)

    def agreed(self, protocol: str) -> None:
        """Send the protocol version in each further request."""
        self._headers[_PROTOCOL] = protocol

    def listen(self) -> None:
        """Request the stream of notifications."""
        self._listening = asyncio.create_task(self._listen())

    async def send(self, message: Message) -> None:
        """Post a message; for a request, receive messages until its answer has arrived."""
        wanted = message["id"] if "method" in message and "id" in message else None
        try:
            async with self._http.stream(
                "POST", self._url, content=orjson.dumps(message), headers=self._headers
            ) as answer:
                await self._check(answer)
                self._headers |= {_SESSION: answer.headers[_SESSION]} if _SESSION in answer.headers else {}
                if wanted is None:
                    return
                async for received in self._messages(answer):
                    self._receive(received)
                    if received.get("id") == wanted and "method" not in received:
                        return
        except httpx2.HTTPError as error:
            raise EnvironmentFailed(f"{self.where} can't be reached: {str(error) or type(error).__name__}") from error
        raise EnvironmentFailed(f"{self.where} ended its answer before the result was there")

    async def close(self) -> None:
        """End the session at the server and close the connections."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._listening is not None:
                await cancelled(self._listening)
            if _SESSION in self._headers:
                with contextlib.suppress(httpx2.HTTPError, TimeoutError):  # the server ends idle sessions by itself
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await client.delete(self._url, headers=self._headers)
        finally:
            await client.aclose()

    @property
    def _http(self) -> httpx2.AsyncClient:
        if self._client is None:
            raise EnvironmentFailed(f"the connection to {self.where} is closed")
        return self._client

    async def _listen(self) -> None:
        """Take announcements until the connection is closed, or the server has no stream of them that can be read."""
        headers = {**self._headers, "accept": "text/event-stream"}
        while True:
            try:
                async with self._http.stream("GET", self._url, headers=headers) as answer:
                    if answer.status_code >= 400:
                        return
                    async for received in self._messages(answer):
                        self._receive(received)
            except httpx2.HTTPError as error:  # a request will say what is wrong
                log.debug("the stream of %s ended: %s", self.where, error)
            except EnvironmentFailed as error:
                log.warning("%s; what it announces is not heard from now on", error)
                return
            await asyncio.sleep(LISTEN_AGAIN_SECONDS)

    async def _messages(self, answer: httpx2.Response) -> AsyncIterator[Message]:
        """Yield the messages of an answer: one JSON object or a stream of events."""
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/event-stream":
            async for event in httpx2.EventSource(answer, max_event_size=self._max_bytes):
                if event.data:  # an event without data only names a place in the stream
                    yield self._read(event.data)
        elif kind == "application/json":
            yield self._read(await self._body(answer))
        else:
            raise EnvironmentFailed(f"{self.where} answers with {kind or 'nothing'}, which is not MCP")

    async def _body(self, answer: httpx2.Response) -> bytes:
        body = b""
        async for chunk in answer.aiter_bytes():
            body += chunk
            if len(body) > self._max_bytes:
                raise EnvironmentFailed(f"{self.where} has sent a message of more than {self._max_bytes:,} bytes")
        return body

    def _read(self, text: str | bytes) -> Message:
        try:
            message = orjson.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise EnvironmentFailed(f"{self.where} has sent what is no message of MCP: {text[:80]!r}")
        return message

    async def _check(self, answer: httpx2.Response) -> None:
        status = answer.status_code
        if status < 300:
            return
        if status == 404 and _SESSION in self._headers:
            self._lost(reason := f"{self.where} has forgotten the session")
            raise EnvironmentFailed(reason)
        if status < 400:
            said = f"it redirects to {answer.headers.get('location', 'another address')}; give that URL"
        else:
            shown = (await self._body(answer))[:200].decode(errors="replace").strip()
            said = _HINTS.get(status) or shown or "it does not say why"
        raise EnvironmentFailed(f"{self.where} answers {status}{through_proxy(self._url)}: {said}")
