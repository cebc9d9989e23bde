"""`ToolManager`: runs the calls of a turn concurrently, and turns every failure into text that the model can read."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited
from palestra.extensions import extensions, load_extension, nearest
from palestra.pictures.parts import is_picture, parts_of
from palestra.tools.calculator import Calculator
from palestra.tools.tool import BadArguments, OpenTools, Tool, ToolSource
from palestra.types.messages import ChatMessage, ImagePart, Part, TextPart, ToolCall
from palestra.waiting import ordinary_errors, together


class ToolFailure(StrEnum):
    """Why a call has no result; also the name under which the failure is counted."""

    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    RAISED = "raised"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The outcome of one call: the text for the model, and whether it is a result or an error."""

    call_id: str
    name: str
    content: str  # as the model reads it: the result, or the error
    failure: ToolFailure | None  # None: the call succeeded
    seconds: float
    parts: tuple[Part, ...] = ()  # the result where it has pictures, whose texts are the content; (): it is text

    @property
    def message(self) -> ChatMessage:
        """Return the outcome as a message with the role `tool`."""
        content = self.parts or (TextPart(text=self.content),)
        return ChatMessage(role="tool", content=content, tool_call_id=self.call_id, name=self.name)


class ToolManager:
    """Tools by name; executes their calls.

    A failure of a tool never fails the episode and is never a reward: the model reads an error and may retry. A tool
    whose server is lost (EnvironmentFailed) fails the attempt at the episode; if a call has ended this episode's own
    server (EpisodeForfeited), that is the agent's loss.
    """

    def __init__(
        self,
        tools: Iterable[Tool | ToolSource] = (),
        *,
        timeout_seconds: float = 30.0,
        max_parallel: int = 256,
        max_result_chars: int = 20_000,
    ) -> None:
        """Create a manager. Tools of a source, such as an `McpServer`, exist between `open` and `close`. A turn has at
        most `max_parallel` concurrent calls; results longer than `max_result_chars` are truncated, with a note.
        """
        if not timeout_seconds > 0:  # NaN is not
            raise ValueError(f"timeout_seconds is {timeout_seconds!r}; give a number above 0")
        if max_parallel < 1 or max_result_chars < 1:
            raise ValueError("max_parallel and max_result_chars are at least 1")
        self._tools: dict[str, Tool] = {}
        self._timeout_seconds, self._max_chars = timeout_seconds, max_result_chars
        self._max_parallel = max_parallel
        self._found: dict[str, Tool] = {}  # the tools of sources that are open
        self.counts: Counter[str] = Counter()  # number of calls, and of failures by kind
        self._sources: list[ToolSource] = []
        self._opened: list[OpenTools] = []
        for tool in tools:
            if isinstance(tool, ToolSource):
                self._sources.append(tool)
            else:
                self.register(tool)

    @property
    def has_sources(self) -> bool:
        """Return whether there are sources that must be opened."""
        return bool(self._sources)

    async def open(self) -> None:
        """Open the closed sources of tools."""
        try:
            for source in self._sources[len(self._opened) :]:
                self._opened.append(await source.open())
            self._found = self._named()
        except BaseException:
            await self.close()
            raise

    async def refresh(self) -> None:
        """Update the tools of sources whose lists have changed."""
        changed = [await source.refresh() for source in self._opened]
        if any(changed):
            self._found = self._named()

    async def close(self) -> None:
        """Close the sources, if there are any."""
        opened, self._opened, self._found = self._opened, [], {}
        for source in reversed(opened):
            await source.close()

    def _named(self) -> dict[str, Tool]:
        """Return the tools of the open sources by name."""
        found: dict[str, Tool] = {}
        for tool in (tool for source in self._opened for tool in source.tools):
            if tool.name in found or tool.name in self._tools:
                raise ValueError(f"there are two tools named {tool.name!r}; give one server a `prefix`")
            found[tool.name] = tool
        return found

    def register(self, tool: Tool) -> None:
        """Add a tool."""
        if tool.name in self._tools:
            raise ValueError(f"there are two tools named {tool.name!r}")
        self._tools[tool.name] = tool

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """Return the tools in OpenAI's shape."""
        return tuple(tool.get_json_schema() for tool in (*self._tools.values(), *self._found.values()))

    async def execute_calls(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one reply concurrently and return their results in order.

        Other failures of tools become a `ToolResult`.
        """
        room = asyncio.Semaphore(self._max_parallel)

        async def one(call: ToolCall) -> ToolResult:
            async with room:
                return await self._execute(call)

        return await together(*map(one, calls))

    async def _execute(self, call: ToolCall) -> ToolResult:
        started = time.monotonic()
        found, failure = await self._outcome(call.function.name, call.function.arguments)
        content, parts = (found, ()) if isinstance(found, str) else (_texts(found), found)
        self.counts["calls"] += 1
        if failure is not None:
            self.counts[failure.value] += 1
        if len(content) > self._max_chars:
            content = f"{content[: self._max_chars]}… ({len(content):,} characters, cut)"
            parts = (TextPart(text=content), *(part for part in parts if isinstance(part, ImagePart))) if parts else ()
        return ToolResult(
            call_id=call.id,
            name=call.function.name,
            content=content,
            failure=failure,
            seconds=time.monotonic() - started,
            parts=parts,
        )

    async def _outcome(self, name: str, text: str) -> tuple[str | tuple[Part, ...], ToolFailure | None]:
        tool = self._tools.get(name) or self._found.get(name)
        if tool is None:
            known = ", ".join((*self._tools, *self._found)) or "none"
            return f"Error: there is no tool {name!r}; known are {known}.", ToolFailure.UNKNOWN_TOOL
        try:
            arguments = tool.check(_arguments(text))
        except BadArguments as error:
            return f"Error: bad arguments for {name}: {error}.", ToolFailure.BAD_ARGUMENTS
        try:
            async with asyncio.timeout(self._timeout_seconds):
                with ordinary_errors():
                    found = await tool.apply_async(**arguments)
            return (parts_of(found) if _has_pictures(found) else _text(found)), None
        except TimeoutError as error:
            # `asyncio.timeout` chains the cancellation as the cause; a TimeoutError without it is the tool's own.
            if isinstance(error.__cause__, asyncio.CancelledError):
                return f"Error: {name} took longer than {self._timeout_seconds:g} s.", ToolFailure.TIMED_OUT
            return _raised(name, error)
        except BadArguments as error:
            return f"Error: bad arguments for {name}: {error}.", ToolFailure.BAD_ARGUMENTS
        except (EnvironmentFailed, EpisodeForfeited):
            raise
        except Exception as error:  # noqa: BLE001 - the tool is the user's; the model reads the error
            return _raised(name, error)


def _has_pictures(result: Any) -> bool:
    """Return whether a result is a picture, or a list of texts and pictures."""
    if isinstance(result, list):
        return any(map(is_picture, result)) and all(isinstance(one, str) or is_picture(one) for one in result)
    # An array of numbers is text as before, unless it has the form of a picture.
    return is_picture(result) and (not hasattr(result, "dtype") or (str(result.dtype) == "uint8" and result.ndim == 3))


def _texts(parts: Sequence[Part]) -> str:
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))


def _raised(name: str, error: Exception) -> tuple[str, ToolFailure]:
    return f"Error: {name} failed: {type(error).__name__}: {error}", ToolFailure.RAISED


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"they are not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadArguments("they are not a JSON object")
    return value


def _text(result: Any) -> str:
    """Return a tool's result as text: text as it is, anything else as JSON, or by `str` if it has no JSON form."""
    if isinstance(result, str):
        return result.encode("utf-8", errors="replace").decode("utf-8")
    try:
        return to_json(result).decode()
    except (PydanticSerializationError, ValueError):
        return str(result)


GROUP = "palestra.tools"  # entry points of packages; each names a tool, a source of tools, or what makes one
_SHIPPED = {"calculator": Calculator}


def installed_tools() -> list[str]:
    """Return the names of the tools that ship with Palestra or installed packages."""
    return [*_SHIPPED, *(name for name in extensions(GROUP) if name not in _SHIPPED)]


def load_tool(name: str) -> Tool | ToolSource:
    """Return the tool, or the source of tools, of a name.

    A package provides one by an entry point of the group `palestra.tools`: a tool, an `McpServer`, or a class or
    function without arguments that creates one.
    """
    if name in _SHIPPED:
        return _SHIPPED[name]()
    point = extensions(GROUP).get(name)
    if point is None:
        hint = nearest(name, installed_tools(), "{!r}")
        raise ConfigError(f"there is no tool {name!r}{hint} (known are {', '.join(installed_tools())})")
    found = load_extension(point)
    if inspect.isclass(found) or inspect.isfunction(found):
        found = found()
    if not isinstance(found, Tool | ToolSource):
        raise ConfigError(f"{point.value} is a {type(found).__name__}, and no tool; decorate it with @palestra.tool")
    return found
