"""Runs the calls of a turn side by side, and turns whatever goes wrong into something that the model can read."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from palestra.schemas.messages import ChatMessage, TextPart, ToolCall
from palestra.tools.tool import BadArguments, Tool


class ToolFailure(StrEnum):
    """Why a call has no result."""

    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    RAISED = "raised"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What became of one call."""

    call_id: str
    name: str
    content: str  # as the model reads it, also where it failed
    failure: ToolFailure | None  # None: it worked
    seconds: float

    @property
    def message(self) -> ChatMessage:
        """The answer, as a message of the conversation."""
        return ChatMessage(
            role="tool", content=(TextPart(text=self.content),), tool_call_id=self.call_id, name=self.name
        )


class ToolManager:
    """Tools by name. A failure of a tool is never one of the program, and never a reward."""

    def __init__(
        self,
        tools: Iterable[Tool] = (),
        *,
        timeout_seconds: float = 30.0,
        max_parallel: int = 256,
        max_result_chars: int = 20_000,
    ) -> None:
        """Each call may take `timeout_seconds`; a longer result than `max_result_chars` is cut.

        Raises:
            ValueError: two tools with one name, or a limit makes no sense.
        """
        if not timeout_seconds > 0:  # NaN is not
            raise ValueError(f"timeout_seconds is {timeout_seconds!r}; give a number above 0")
        if max_parallel < 1 or max_result_chars < 1:
            raise ValueError("max_parallel and max_result_chars are at least 1")
        self._tools: dict[str, Tool] = {}
        self._timeout_seconds, self._max_chars = timeout_seconds, max_result_chars
        self._max_parallel = max_parallel
        self.counts: Counter[str] = Counter()  # calls, and failures by kind
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool) -> None:
        """Add a tool.

        Raises:
            ValueError: there is one with this name.
        """
        if tool.name in self._tools:
            raise ValueError(f"there are two tools named {tool.name!r}")
        self._tools[tool.name] = tool

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """What a model is told of them, in OpenAI's shape."""
        return tuple(tool.get_json_schema() for tool in self._tools.values())

    async def execute_calls(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls at once; returns their results in the same order. Raises nothing but cancellation."""
        room = asyncio.Semaphore(self._max_parallel)

        async def one(call: ToolCall) -> ToolResult:
            async with room:
                return await self._execute(call)

        return list(await asyncio.gather(*map(one, calls)))

    async def _execute(self, call: ToolCall) -> ToolResult:
        started = time.monotonic()
        content, failure = await self._outcome(call.function.name, call.function.arguments)
        self.counts["calls"] += 1
        if failure is not None:
            self.counts[failure.value] += 1
        if len(content) > self._max_chars:
            content = f"{content[: self._max_chars]}… ({len(content):,} characters, cut)"
        seconds = time.monotonic() - started
        return ToolResult(call_id=call.id, name=call.function.name, content=content, failure=failure, seconds=seconds)

    async def _outcome(self, name: str, text: str) -> tuple[str, ToolFailure | None]:
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return f"Error: there is no tool {name!r}; known are {known}.", ToolFailure.UNKNOWN_TOOL
        try:
            arguments = tool.check(_arguments(text))
        except BadArguments as error:
            return f"Error: bad arguments for {name}: {error}.", ToolFailure.BAD_ARGUMENTS
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return _text(await tool.apply_async(**arguments)), None
        except TimeoutError as error:
            if isinstance(error.__cause__, asyncio.CancelledError):
                return f"Error: {name} took longer than {self._timeout_seconds:g} s.", ToolFailure.TIMED_OUT
            return _raised(name, error)
        except BadArguments as error:
            return f"Error: bad arguments for {name}: {error}.", ToolFailure.BAD_ARGUMENTS
        except Exception as error:  # noqa: BLE001 - the tool is the user's; the model is told
            return _raised(name, error)


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
    """Text stays text; anything else becomes JSON, or what `str` makes of it."""
    if isinstance(result, str):
        return result.encode("utf-8", errors="replace").decode("utf-8")
    try:
        return to_json(result).decode()
    except (PydanticSerializationError, ValueError):
        return str(result)
