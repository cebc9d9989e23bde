"""`NemoGymEnvironment`: the tools and the verifier of a resources server of NeMo Gym, over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import httpx2
import orjson

from palestra.client.exchange import checked_key, checked_url
from palestra.client.plain_values import checked_amount, checked_count
from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.errors import EnvironmentFailed, EpisodeForfeited, InvalidEnvironment
from palestra.http_clients import async_http_client, trusted
from palestra.proxies import through_proxy
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage, FunctionCall, Observation, TextPart, ToolCall, text_message

_TEXTS = ("input_text", "output_text", "text")


def conversation_of(asked: Mapping[str, Any], system: str | None) -> tuple[ChatMessage, ...]:
    """Return the initial messages of an episode from a task's `responses_create_params`. `system`: a system message
    before all others; None: the task's own, if it has one.
    """
    given = asked["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise InvalidEnvironment("the task's `input` is neither a text nor a list of items")
    found = [_message_of(item) for item in items]
    if system is None and isinstance(asked.get("instructions"), str):
        system = asked["instructions"]
    return (*(() if system is None else (text_message("system", system),)), *found)


def tools_of(given: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return tools in the shape of the chat API, from the Responses API's."""
    found = []
    for tool in given:
        if tool.get("type") != "function":
            raise InvalidEnvironment(
                f"the task has a tool of the kind {tool.get('type')!r}; only functions can be called"
            )
        named = {"name": tool["name"], "description": tool.get("description") or ""}
        found.append({"type": "function", "function": {**named, "parameters": tool.get("parameters") or {}}})
    return tuple(found)


def reply_items(action: ChatMessage, number: int) -> list[dict[str, Any]]:
    """Return an agent's reply as items: its text, then its calls."""
    items: list[dict[str, Any]] = []
    if action.text or not action.tool_calls:
        content = [{"type": "output_text", "text": action.text, "annotations": []}]
        said = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**said, "content": content})
    for place, call in enumerate(action.tool_calls):
        items.append(
            {
                "id": f"fc_{number}_{place}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.function.name,
                "arguments": call.function.arguments,
                "status": "completed",
            }
        )
    return items


def tool_output(result: ChatMessage, number: int) -> dict[str, Any]:
    """Return the result of a tool as an item."""
    said = {"type": "function_call_output", "call_id": result.tool_call_id, "output": result.text}
    return {"id": f"fco_{number}", **said, "status": "completed"}


def _message_of(item: Any) -> ChatMessage:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return text_message(item["role"], _text_of(item.get("content")))
    if kind == "function_call":
        function = FunctionCall(name=item["name"], arguments=item["arguments"])
        return ChatMessage(role="assistant", tool_calls=(ToolCall(id=item["call_id"], function=function),))
    if kind == "function_call_output":
        text = TextPart(text=_text_of(item.get("output")))
        return ChatMessage(role="tool", content=(text,), tool_call_id=item["call_id"])
    raise InvalidEnvironment(f"the task's `input` has an item of the kind {kind!r}, which can't be shown")


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidEnvironment(f"the task's `input` has a part of the kind {kind!r}; only text can be shown")
    return "".join(part["text"] for part in parts)


MAX_ANSWER_BYTES = 16 << 20  # of one answer of the server: results of tools are a few kilobytes
EXAMPLE = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0
_NOT_TOOLS = ("seed_session", "verify", "aggregate_metrics")  # routes that a model must not call


class _TooLong(EnvironmentFailed):
    """An answer of the server is too long."""


class NemoGymEnvironment(ConcurrentEnvironment):
    """An episode at a resources server of NeMo Gym.

    A task is a row of a data set of NeMo Gym: `responses_create_params` with the input and the tools, and the
    verifier's data. The agent's calls become requests to the server's routes, in the session begun by `seed_session`;
    its first reply without a call, or the last of `max_steps` replies, goes to `verify`, which returns the reward.

    The agent sees a tool's answers, including errors, as in NeMo Gym. A call that the server aborts without an answer
    is a forfeit. A server that cannot be reached, or does not verify, fails the attempt at the episode, which has no
    reward.
    """

    reusable = True

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        system: str | None = None,
        max_steps: int = 16,
        tool_seconds: float = 30.0,
        verify_seconds: float = 300.0,
        clock: Clock | None = None,
    ) -> None:
        """Take the address of a resources server.

        Args:
            url: the server's URL, such as `http://127.0.0.1:8000`.
            key: is sent as `Authorization: Bearer`; None: none is.
            system: system message before the task's input; None: the task's own, if it has one.
            max_steps: replies that the agent may make in an episode.
            tool_seconds: limit for one call of a tool; a later result is an error that the agent reads.
            verify_seconds: limit for the verifier, which may ask a model.
            clock: source of the times of observations; None: the system's clock.

        Raises:
            ConfigError: the URL is no URL, or a number makes no sense.
        """
        super().__init__(clock)
        self.max_steps = checked_count("max_steps", max_steps)
        self._tool_seconds = checked_amount("tool_seconds", tool_seconds, above_zero=True)
        self._verify_seconds = checked_amount("verify_seconds", verify_seconds, above_zero=True)
        self._headers = {"authorization": f"Bearer {checked_key(key)}"} if key else {}
        self._url, self._system = checked_url(url, EXAMPLE), system
        self._http: httpx2.AsyncClient | None = None
        self._task: Mapping[str, Any] = {}
        self._tools: tuple[dict[str, Any], ...] = ()
        self._output: list[dict[str, Any]] = []  # what the agent and its tools have said, as items of a response

    async def close(self) -> None:
        """End the episode's work and the connection."""
        await self.abandon()
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def start(self, task: Mapping[str, Any]) -> None:
        """Begin a session, and show the agent the task's input and tools."""
        asked = task.get("responses_create_params")
        if not isinstance(asked, Mapping) or "input" not in asked:
            raise InvalidEnvironment("a task of NeMo Gym has `responses_create_params` with an `input`")
        await self.close()
        # The session is a cookie, so each episode has a client of its own.
        headers = {**self._headers, "content-type": "application/json"}
        self._http = async_http_client(base_url=self._url, headers=headers, verify=trusted(), follow_redirects=False)
        self._task, self._output = task, []
        self._tools = tools_of(asked.get("tools") or ())
        messages = conversation_of(asked, self._system)
        await self._asked("/seed_session", dict(task), self._tool_seconds)
        self.emit("agent", messages, tools=self._tools)

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Run the action's calls and show their results, or verify and end the episode."""
        self._output += reply_items(action, len(self._output))
        if action.tool_calls and not self.cut_off:
            # One after another, as NeMo Gym's own agent: a call may need what the one before it has changed.
            results = [await self._call(call) for call in action.tool_calls]
            begun = len(self._output)
            self._output += [tool_output(message, begun + place) for place, message in enumerate(results)]
            self.emit("agent", tuple(results), parents=(observation.id,), tools=self._tools)
            return
        verified = await self._asked("/verify", {**self._task, "response": self._response()}, self._verify_seconds)
        reward = verified.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise InvalidEnvironment(
                f"{self._url}/verify answers with the reward {reward!r}, which is no finite number"
            )
        self.emit(
            "agent", (), parents=(observation.id,), reward=float(reward), terminated=not action.tool_calls,
            info={name: value for name, value in verified.items() if isinstance(value, bool | int | float | str)},
        )  # fmt: skip

    async def _call(self, call: ToolCall) -> ChatMessage:
        """Return the server's answer to a call, as a message."""
        text = await self._result(call)
        return ChatMessage(role="tool", content=(TextPart(text=text),), tool_call_id=call.id, name=call.function.name)

    async def _result(self, call: ToolCall) -> str:
        name, known = call.function.name, [tool["function"]["name"] for tool in self._tools]
        if name not in known or name in _NOT_TOOLS:
            return json.dumps({"error": f"there is no tool {name!r}; known are {', '.join(known) or 'none'}"})
        try:
            # What Python reads as JSON and HTTP can't carry, such as NaN, is the agent's error, and none of the server.
            arguments = _json(json.loads(call.function.arguments or "{}"))
        except (ValueError, RecursionError) as error:
            return json.dumps({"error": f"the arguments are not JSON: {error}"})
        try:
            return (await self._post(f"/{name}", arguments, self._tool_seconds))[1].decode(errors="replace")
        except TimeoutError:
            return json.dumps({"error": f"{name} took longer than {self._tool_seconds:g} s"})
        except _TooLong as error:
            return json.dumps({"error": str(error)})

    async def _asked(self, path: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Post to a route whose failure fails the episode, and return its answer."""
        try:
            status, text = await self._post(path, _json(body), seconds)
        except TimeoutError:
            raise EnvironmentFailed(f"{self._url}{path} did not answer within {seconds:g} s") from None
        except EpisodeForfeited as error:  # no call of the agent's
            raise EnvironmentFailed(str(error)) from error
        if status == 404:
            raise EnvironmentFailed(f"{self._url} has no {path}: it is no resources server of NeMo Gym")
        if status != 200:
            said = text[:300].decode(errors="replace")
            raise EnvironmentFailed(f"{self._url}{path} answers {status}{through_proxy(self._url)}: {said}")
        try:
            found = orjson.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EnvironmentFailed(f"{self._url}{path} answers with {text[:80]!r}, which is no JSON object")
        return found

    async def _post(self, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Send a request, and return status and body of its answer."""
        assert self._http is not None
        limits, found = httpx2.Timeout(None, connect=CONNECT_SECONDS), b""
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream("POST", path, content=body, timeout=limits) as answer,
            ):
                async for chunk in answer.aiter_bytes():
                    found += chunk
                    if len(found) > MAX_ANSWER_BYTES:
                        raise _TooLong(f"{self._url}{path} answers with more than {MAX_ANSWER_BYTES:,} bytes")
        except (httpx2.ReadError, httpx2.RemoteProtocolError) as error:
            raise EpisodeForfeited(f"{self._url}{path} broke off: {str(error) or type(error).__name__}") from error
        except httpx2.HTTPError as error:
            raise EnvironmentFailed(f"{self._url} can't be reached: {str(error) or type(error).__name__}") from error
        return answer.status_code, found

    def _response(self) -> dict[str, Any]:
        """Return the reply as an object `response` of OpenAI's Responses API."""
        asked = self._task["responses_create_params"]
        return {
            "id": "resp_palestra",
            "object": "response",
            "created_at": self.clock.now(),
            "model": asked.get("model") or "palestra",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": list(asked.get("tools") or ()),
        }


def _json(body: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(body, allow_nan=False).encode()
