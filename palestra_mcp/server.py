"""`McpServer`: the tools of an MCP server, given to an environment or an agent like tools of Python."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited, PalestraError
from palestra.tools.tool import BadArguments, OpenTools, Tool, ToolSource
from palestra.types.messages import ToolSpec
from palestra_mcp.connection import MAX_MESSAGE_BYTES, McpConnection, McpError, Transport
from palestra_mcp.results import McpToolError, tool_content
from palestra_mcp.transports import HttpTransport, StdioTransport

log = logging.getLogger("palestra.tools")
RESTART_SECONDS = 60.0  # in which a shared server may be started again `max_restarts` times
Schemas = Callable[[str, Sequence[Mapping[str, Any]]], dict[str, dict[str, Any]]]
_BAD_ARGUMENTS = re.compile(r"invalid (params|arguments)|validation error", re.IGNORECASE)


class McpServer(ToolSource):
    """The tools of an MCP server; add it to the list of tools of a `ToolEnvironment`.

    Each environment has its own session, and over stdio its own process, so that episodes are isolated. With `shared`
    all environments use one session, for a server without state between calls.

    The model reads a tool's error as text. A call that ends a server started for it is a forfeit. A killed server, or
    an unreachable URL, fails the attempt at the episode, which has no reward and is retried with a new session. A
    shared server that is lost is restarted by the next call.
    """

    def __init__(
        self,
        where: str | Sequence[str],
        *,
        tools: Collection[str] | None = None,
        prefix: str = "",
        shared: bool = False,
        headers: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        start_seconds: float = 30.0,
        max_restarts: int = 3,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        pictures: bool = False,
    ) -> None:
        """Describe a server without starting or connecting to it.

        Args:
            where: a URL, such as `http://127.0.0.1:8000/mcp`, or a command, such as `["python", "server.py"]`, that
                speaks MCP on its standard input and output.
            tools: names of the tools to offer; None: all.
            prefix: prepended to each tool's name, in case two servers have tools of the same name.
            shared: whether all environments of this process share one session.
            headers: of every request to a URL, such as a key.
            variables: environment variables of a command, which inherits few of this process's, and no keys.
            folder: working directory of a command; None: this process's.
            start_seconds: timeout for starting a session, including the list of tools.
            max_restarts: limit of a lost shared server's restarts per minute.
            max_message_bytes: limit of one server message; a longer one ends the session.
            pictures: whether images in results reach the model as pictures, for a vision-language model; otherwise a
                line names what was left out.

        Raises:
            ConfigError: `where` is neither a URL nor a command, an option belongs to the other kind, or a number is
                invalid.
        """
        is_url = isinstance(where, str)
        self._where = _checked_url(where) if isinstance(where, str) else _checked_command(where)
        if is_url and (variables or folder is not None):
            raise ConfigError("variables and folder are of a command, and a URL was given")
        if not is_url and headers:
            raise ConfigError("headers are of a URL, and a command was given; a command gets `variables`")
        if not start_seconds > 0 or max_restarts < 0 or max_message_bytes < 1:
            raise ConfigError("start_seconds and max_message_bytes are above 0, and max_restarts is not below")
        self.shared = shared
        self._chosen, self._prefix = None if tools is None else frozenset(tools), prefix
        self._headers, self._variables = dict(headers or {}), dict(variables or {})
        self._folder = None if folder is None else Path(folder)
        self._start_seconds, self._max_restarts, self._max_bytes = start_seconds, max_restarts, max_message_bytes
        self._pictures = pictures
        self._common: _Common | None = None

    async def open(self) -> OpenTools:
        """Begin a session and read the list of tools; or share the existing session.

        Raises:
            EnvironmentFailed: the server cannot be reached or started, or its tools cannot be offered to a model.
            ProtocolMismatch: it has no version of MCP in common with this client.
        """
        if not self.shared:
            link = _Link(self._connect, self._start_seconds, restarts=None)
            try:
                return await McpTools.opened(link, self._schemas, link.close, self._pictures)
            except BaseException:
                await link.close()
                raise
        loop = asyncio.get_running_loop()
        if self._common is None or self._common.loop is not loop:
            link = _Link(self._connect, self._start_seconds, self._max_restarts)
            self._common = _Common(loop, link, self._pictures)
        return await self._common.open(self._schemas)

    async def _connect(self) -> McpConnection:
        connection = McpConnection(self._transport())
        try:
            async with asyncio.timeout(self._start_seconds):
                await connection.open()
        except TimeoutError:
            await connection.close()
            raise EnvironmentFailed(f"{connection.where} did not answer within {self._start_seconds:g} s") from None
        except BaseException:
            await connection.close()
            raise
        return connection

    def _transport(self) -> Transport:
        if isinstance(self._where, str):
            return HttpTransport(self._where, self._headers, self._max_bytes)
        return StdioTransport(self._where, self._variables, self._folder, self._max_bytes)

    def _schemas(self, where: str, listed: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the tools that are offered, in OpenAI's shape, by the server's own names for them."""
        found: dict[str, dict[str, Any]] = {}
        for tool in listed:
            name = tool.get("name")
            if not isinstance(name, str):
                raise EnvironmentFailed(f"{where} lists a tool without a name")
            if self._chosen is None or name in self._chosen:
                found[name] = _schema(where, self._prefix + name, tool)
        if missing := sorted((self._chosen or frozenset()) - set(found)):
            known = ", ".join(str(tool.get("name")) for tool in listed) or "none"
            raise EnvironmentFailed(f"{where} has no tool {missing[0]!r}; it has {known}")
        return found


class _Link:
    """A connection that may be renewed a limited number of times."""

    def __init__(self, connect: Callable[[], Awaitable[McpConnection]], seconds: float, restarts: int | None) -> None:
        self.seconds = seconds  # limit for reading the list of tools
        self._own = restarts is None  # whether no other environment has this connection
        self._connect, self._restarts = connect, restarts or 0
        self._connection: McpConnection | None = None
        self._making = asyncio.Lock()
        self._made_at: list[float] = []  # monotonic: of the connections of the last minute but the first

    async def connection(self) -> McpConnection:
        """Return the connection; make the first, or another one where the last is lost and that is allowed."""
        async with self._making:
            old = self._connection
            if old is not None and old.lost is None:
                return old
            if old is not None:
                now = time.monotonic()
                self._made_at = [made for made in self._made_at if now - made < RESTART_SECONDS]
                if len(self._made_at) >= self._restarts:
                    often = f", {self._restarts + 1} times in a minute" if self._restarts else ""
                    failed = EnvironmentFailed(f"{old.lost}{often}")
                    raise failed if often else self.blamed(old, failed)
                self._made_at.append(now)
                log.warning("%s; starting it again", old.lost)
                await old.close()
            self._connection = made = await self._connect()
            return made

    def blamed(self, connection: McpConnection, error: EnvironmentFailed) -> PalestraError:
        """Return `error`, or a forfeit if only a call of this episode can have ended the server.

        That is the case for its own process that was not killed. The fate of a server at a URL is unknown.
        """
        only = self._own or connection.lost_alone
        return EpisodeForfeited(str(error)) if only and connection.ended_by_itself else error

    async def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Common:
    """The session that all users of a shared server have, until the last of them has closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, link: _Link, pictures: bool) -> None:
        self.loop = loop
        self._link, self._users, self._pictures = link, 0, pictures

    async def open(self, schemas: Schemas) -> McpTools:
        self._users += 1
        try:
            return await McpTools.opened(self._link, schemas, self._leave, self._pictures)
        except BaseException:
            await self._leave()
            raise

    async def _leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            await self._link.close()


class McpTools(OpenTools):
    """The tools of a server for one user."""

    def __init__(self, link: _Link, schemas: Schemas, leave: Callable[[], Awaitable[None]], pictures: bool) -> None:
        """Create the list; `opened` fills it. `leave` is called when the user no longer needs the tools."""
        self._link, self._schemas, self._pictures = link, schemas, pictures
        self._leave: Callable[[], Awaitable[None]] | None = leave
        self._seen: tuple[McpConnection, int] | None = None  # whose list was read, and after how many changes
        self._tools: tuple[Tool, ...] = ()

    @classmethod
    async def opened(
        cls, link: _Link, schemas: Schemas, leave: Callable[[], Awaitable[None]], pictures: bool
    ) -> McpTools:
        """Return the tools with their list read; see `__init__`."""
        made = cls(link, schemas, leave, pictures)
        await made.refresh()
        return made

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools of the newest list."""
        return self._tools

    async def refresh(self) -> bool:
        """Read the list if the server has announced a change, or was restarted."""
        connection = await self._link.connection()
        seen = (connection, connection.changes)
        if seen == self._seen:
            return False
        try:
            async with asyncio.timeout(self._link.seconds):
                listed = self._schemas(connection.where, await connection.list_tools())
        except TimeoutError:
            raise EnvironmentFailed(
                f"{connection.where} did not list its tools within {self._link.seconds:g} s"
            ) from None
        self._tools = tuple(McpTool(self._link, name, schema, self._pictures) for name, schema in listed.items())
        self._seen = seen
        return True

    async def close(self) -> None:
        """End the session, unless others share it."""
        leave, self._leave = self._leave, None
        if leave is not None:
            await leave()


class McpTool(Tool):
    """One tool of a server. The server checks the arguments against its schema."""

    def __init__(self, link: _Link, name: str, schema: dict[str, Any], pictures: bool) -> None:
        """Create the tool. `name` is the server's own for the tool."""
        self._link, self._name, self._schema, self._pictures = link, name, schema, pictures

    def get_json_schema(self) -> dict[str, Any]:
        """Return the server's schema in OpenAI's shape."""
        return self._schema

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check that no required argument is missing; the server checks the rest."""
        parameters = self._schema["function"]["parameters"]
        if missing := [name for name in parameters.get("required") or () if name not in arguments]:
            raise BadArguments(f"the argument {missing[0]!r} is missing")
        return dict(arguments)

    async def apply_async(self, /, **arguments: Any) -> str | list[str | bytes]:
        """Call the tool at the server and return its result as text, or as texts and pictures. Raises BadArguments: the
        server reports wrong arguments. Raises McpToolError: the tool has failed, for the model to read.
        """
        connection = await self._link.connection()
        try:
            found = await connection.request("tools/call", {"name": self._name, "arguments": arguments})
        except McpError as error:
            if _BAD_ARGUMENTS.search(str(error)):
                raise BadArguments(str(error)) from error
            raise McpToolError(str(error)) from error
        except EnvironmentFailed as error:
            raise self._link.blamed(connection, error) from None
        return tool_content(found, self._pictures)


def _schema(where: str, name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    given = tool.get("inputSchema")
    parameters = {"type": "object", "properties": {}, **(given if isinstance(given, Mapping) else {})}
    described = str(tool.get("description") or tool.get("title") or "")
    schema = {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}
    try:
        ToolSpec.model_validate(schema)
        json.dumps(schema, allow_nan=False)
    except (ValidationError, ValueError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise EnvironmentFailed(
            f"{where} has a tool {name[:200]!r} that can't be offered to a model: {said}"
        ) from error
    return schema


def _checked_url(url: str) -> str:
    parsed = urlsplit(url)
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise ConfigError(
            f"{url!r} is no URL of an MCP server, such as http://127.0.0.1:8000/mcp; a command is a list of words"
        )
    return url


def _checked_command(command: Sequence[str]) -> tuple[str, ...]:
    words = tuple(command)
    if not words or not words[0] or any("\0" in word for word in words):
        raise ConfigError('a command is a list of words, such as ["python", "server.py"]')
    return words
