"""`OpenEnvEnvironment`: an environment of a server of OpenEnv, played over its WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from typing import Any

import httpx2
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from palestra.client.exchange import checked_key, checked_url
from palestra.client.plain_values import checked_amount, checked_count
from palestra.envs.environment import Environment, StepMessage
from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited, NotScored, TooManyRequests
from palestra.http_clients import WebSocket, async_http_client, trusted
from palestra.proxies import through_proxy
from palestra.types.messages import ChatMessage, TextPart, ToolCall

CONNECT_SECONDS, PING_SECONDS, CLOSE_SECONDS = 10.0, 20.0, 2.0
_FULL_PAUSE_SECONDS = 0.5  # until a server whose sessions are all in use is asked again
_FULL, INVALID_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"


class OpenEnvError(Exception):
    """The server has answered a message with an error.

    Attributes:
        code: OpenEnv's name of the kind of error.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})" if code else message)
        self.code = code


class SessionLost(EnvironmentFailed):
    """The session has ended while a message waited for its answer."""


class OpenEnvLink:
    """A connection, which is a session: the server's environment ends with it."""

    def __init__(
        self, url: str, headers: Mapping[str, str], wait_seconds: float, reply_seconds: float, max_message_bytes: int
    ) -> None:
        """Store the address; `open` connects."""
        self._url, self._headers = url, dict(headers)
        self._wait_seconds, self._reply_seconds = wait_seconds, reply_seconds
        self._max_bytes = max_message_bytes
        self._socket: ClientConnection | None = None

    @property
    def is_open(self) -> bool:
        """Return whether there is a connection, as far as known."""
        return self._socket is not None

    async def schema(self) -> dict[str, Any]:
        """Return the JSON schemas of actions and observations."""
        limits = httpx2.Timeout(CONNECT_SECONDS)
        try:
            async with (
                async_http_client(timeout=limits, verify=trusted(), follow_redirects=False) as http,
                http.stream("GET", f"{self._url}/schema", headers=self._headers) as answer,
            ):
                body = b""
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise EnvironmentFailed(f"the schema of {self._url} has more than {self._max_bytes:,} bytes")
        except httpx2.HTTPError as error:
            raise EnvironmentFailed(
                f"no OpenEnv server can be reached at {self._url}: {str(error) or type(error).__name__}"
            ) from error
        try:
            found = json.loads(body) if answer.status_code == 200 else None
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("action"), dict):
            raise EnvironmentFailed(
                f"{self._url}/schema answers {answer.status_code}{through_proxy(self._url)}, and no schema of actions: "
                "this is no OpenEnv server"
            )
        return found

    async def open(self) -> None:
        """Connect, unless connected, waiting while all sessions are in use. Raises TooManyRequests if no session became
        free in time.
        """
        until = asyncio.get_running_loop().time() + self._wait_seconds
        while self._socket is None:
            await self._connect()
            try:
                # A server without a free session says so instead of an answer, and hangs up.
                await self.ask({"type": "state"})
            except OpenEnvError as error:
                if error.code != _FULL:
                    return  # the server is there; what it objects to is of the message
                await self.close()
                if asyncio.get_running_loop().time() >= until:
                    raise TooManyRequests(
                        f"all sessions of {self._url} are in use, and none has become free in {self._wait_seconds:g} s;"
                        " play fewer episodes at the same time, or start the server with more `max_concurrent_envs`"
                    ) from error
                await asyncio.sleep(_FULL_PAUSE_SECONDS)

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer. Raises OpenEnvError if the server answers with an error.
        Raises SessionLost after a timeout or a lost connection; the session has ended.
        """
        socket = self._socket
        if socket is None:
            raise EnvironmentFailed(f"there is no connection to {self._url}")
        try:
            async with asyncio.timeout(self._reply_seconds):
                with contextlib.suppress(ConnectionClosed):  # a server that has hung up may have said why before
                    await socket.send(json.dumps(message))
                text = await socket.recv()
        except TimeoutError:
            await self.close()
            raise SessionLost(f"{self._url} did not answer within {self._reply_seconds:g} s") from None
        except ConnectionClosed as error:
            await self.close()
            raise SessionLost(f"the connection to {self._url} was lost: {error}") from error
        except asyncio.CancelledError:
            await self.close()  # an answer that comes later would be taken for that to the next message
            raise
        try:
            answer = json.loads(text)
            kind, data = answer["type"], answer["data"]
        except (ValueError, TypeError, KeyError):
            kind, data = None, None
        if not isinstance(data, dict):
            await self.close()
            raise EnvironmentFailed(f"{self._url} has sent what is no message of OpenEnv: {text[:80]!r}")
        if kind == "error":
            raise OpenEnvError(str(data.get("code", "")), str(data.get("message", "it does not say why"))[:2000])
        return data

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await socket.send(json.dumps({"type": "close"}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await socket.close()

    async def _connect(self) -> None:
        scheme, _, rest = self._url.partition(":")
        secure: ssl.SSLContext | None = trusted() if scheme == "https" else None
        try:
            self._socket = await WebSocket(
                f"{'wss' if scheme == 'https' else 'ws'}:{rest}/ws",
                additional_headers=self._headers,
                open_timeout=CONNECT_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=PING_SECONDS,
                close_timeout=CLOSE_SECONDS,
                max_size=self._max_bytes,
                ssl=secure,
            )
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise EnvironmentFailed(
                f"no session of OpenEnv at {self._url}{through_proxy(self._url)}: {str(error) or type(error).__name__}"
            ) from error


EXAMPLE = "http://127.0.0.1:8000"
ACT = "act"  # the tool whose arguments are the fields of an action
_OF_TOOLS = ("CallToolAction", "ListToolsAction")  # schemas of servers whose actions are calls of MCP tools
_OWN_FIELDS = ("metadata",)  # of every action and observation, and of no interest to a model


class OpenEnvEnvironment(Environment):
    """An environment of a server that speaks OpenEnv's protocol.

    A reply becomes an action by the server's own schema: for an action with one field it is the text of the reply; for
    one with several, the reply is a JSON object or a call of the tool `act`; if actions are calls of MCP tools, the
    agent has these tools.

    A task's keys are the arguments of `reset`, such as `seed`. The agent sees an error for an action that the server's
    schema refuses, with the reward 0. The agent forfeits the episode if the environment raises on its action, does not
    answer in time, or ends the session while the server continues. If the server is lost, the attempt fails without a
    reward.
    """

    reusable = True
    blocking = False

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        action_field: str | None = None,
        rules: str = "",
        system: str | None = None,
        max_steps: int = 32,
        wait_seconds: float = 600.0,
        reply_seconds: float = 60.0,
        max_message_bytes: int = 16 << 20,
    ) -> None:
        """Store the address of a server; `setup` connects.

        Args:
            url: the server's URL, such as `http://127.0.0.1:8000`.
            key: sent as `Authorization: Bearer`; None: none.
            action_field: the action field that the reply's text fills; None: found in the schema.
            rules: text before the first observation of each episode.
            system: system message of the agent's conversation, if any.
            max_steps: number of actions after which an episode is truncated.
            wait_seconds: how long to wait while all of the server's sessions are in use.
            reply_seconds: limit for the answer to one action.
            max_message_bytes: limit of one message of the server.

        Raises:
            ConfigError: the URL or a number is invalid.
        """
        checked_amount("wait_seconds", wait_seconds, endless=True)
        checked_amount("reply_seconds", reply_seconds, above_zero=True)
        checked_count("max_message_bytes", max_message_bytes)
        self.max_steps = checked_count("max_steps", max_steps)
        self.system = system
        headers = {"authorization": f"Bearer {checked_key(key)}"} if key else {}
        self._url = checked_url(url, EXAMPLE)
        self._link = OpenEnvLink(self._url, headers, wait_seconds, reply_seconds, max_message_bytes)
        self._wanted, self._rules = action_field, rules
        self._field: str | None = None  # of an action that is the text of a reply
        self._calls_tools = False
        self._schema: dict[str, Any] = {}
        self._paid = False  # whether any reward has come in this episode

    async def setup(self) -> None:
        """Read the schema of actions, and begin a session.

        Raises:
            EnvironmentFailed: no server of OpenEnv can be reached at the URL.
            TooManyRequests: all sessions stayed in use.
            ConfigError: actions have no such field as `action_field`.
        """
        self._schema = (await self._link.schema())["action"]
        fields = {name: field for name, field in self._schema.get("properties", {}).items() if name not in _OWN_FIELDS}
        # A server whose actions are several calls gives the schema of their base class, which has no fields of its own.
        self._calls_tools = self._schema.get("title") in _OF_TOOLS or not fields
        if self._wanted is not None and self._wanted not in fields:
            raise ConfigError(
                f"actions of {self._url} have no field {self._wanted!r}; they have {', '.join(fields) or 'none'}"
            )
        required = [name for name in self._schema.get("required", ()) if name in fields] or list(fields)
        self._field = self._wanted or (required[0] if len(required) == 1 else None)
        self.tools = () if self._field is not None or self._calls_tools else (_act_tool(self._schema, fields),)
        await self._link.open()

    async def close(self) -> None:
        """End the session."""
        await self._link.close()

    async def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin an episode, in a new session if the last one has ended."""
        self._paid = False
        fresh = not self._link.is_open
        await self._link.open()
        try:
            data = await self._ask({"type": "reset", "data": dict(task)})
        except EnvironmentFailed:
            if fresh or self._link.is_open:
                raise
            await self._link.open()  # the connection was lost between two episodes, so nothing of this one was seen
            data = await self._ask({"type": "reset", "data": dict(task)})
        if self._calls_tools:
            listed = (await self._ask({"type": "step", "data": {"type": "list_tools"}})).get("observation", {})
            self.tools = tuple(_tool(tool) for tool in listed.get("tools", ()))
        seen = self.describe(data.get("observation", {}))
        return (f"{self._rules}\n{seen}" if self._rules else seen) or "Begin.", {"metadata": data.get("metadata")}

    async def step(self, action: str) -> StepMessage:
        """Send a reply of text; see `step_message`."""
        return await self.step_message(ChatMessage(role="assistant", content=(TextPart(text=action),)))

    async def step_message(self, action: ChatMessage) -> StepMessage:
        """Send an action, or one for each tool call of the reply.

        Raises:
            NotScored: the episode is over, and the server gave no reward, not even 0.
            EpisodeForfeited: the environment did not survive the action.
            EnvironmentFailed: the server is lost.
        """
        answers: list[ChatMessage] = []
        seen, reward, done = "", 0.0, False
        info: dict[str, Any] = {}
        for call in action.tool_calls or (None,):
            said = "Error: the episode is over."
            if not done:
                said, paid, done, info = await self._act(
                    self._of_text(action.text) if call is None else self._of_call(call)
                )
                reward += paid
            if call is None:
                seen = said
            else:
                answers.append(_answer(call, said))
        if done and not self._paid:
            raise NotScored(f"{self._url} has paid no reward in this episode")
        return tuple(answers) or seen, reward, done, False, info

    def describe(self, observation: Mapping[str, Any]) -> str:
        """Return an observation as text: its only field unchanged, several as JSON. Override it for another form.

        Args:
            observation: its fields.
        """
        shown = {name: value for name, value in observation.items() if name not in _OWN_FIELDS and value is not None}
        if self._calls_tools and "result" in shown:
            shown = {"result": shown["result"]}
        if len(shown) == 1:
            (only,) = shown.values()
            return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)
        return json.dumps(shown, ensure_ascii=False) if shown else ""

    async def _act(self, action: dict[str, Any] | str) -> tuple[str, float, bool, dict[str, Any]]:
        """Send one action, or explain what is wrong with it; return observation, reward, end and information."""
        if isinstance(action, str):
            return action, 0.0, False, {"invalid": True}
        try:
            data = await self._link.ask({"type": "step", "data": action})
        except OpenEnvError as error:
            if error.code == INVALID_ACTION:
                return f"Error: {error}", 0.0, False, {"invalid": True}
            raise EpisodeForfeited(f"the environment of {self._url} has failed: {error}") from error
        except SessionLost as error:
            await self._link.schema()  # fails where the server is gone, which no action is to blame for
            raise EpisodeForfeited(str(error)) from error
        reward = data.get("reward")
        self._paid = self._paid or reward is not None  # OpenEnv pays null where a step has no reward
        seen = self.describe(data.get("observation", {}))
        return seen, reward or 0.0, bool(data.get("done")), dict(data.get("metadata") or {})

    def _of_text(self, text: str) -> dict[str, Any] | str:
        """Return the action of a text reply, or an explanation of the mistake for the agent."""
        if self._calls_tools:
            return "Error: call one of the tools."
        if self._field is not None:
            kind = self._schema["properties"][self._field].get("type", "string")
            if kind == "string":
                return {self._field: text}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return "Error: the reply is not JSON."
        if self._field is not None and not (isinstance(found, dict) and self._field in found):
            return {self._field: found}
        return found if isinstance(found, dict) else "Error: the reply is not a JSON object."

    def _of_call(self, call: ToolCall) -> dict[str, Any] | str:
        """Return the action of a tool call, or an explanation of the mistake for the agent."""
        known = [tool["function"]["name"] for tool in self.tools]
        if call.function.name not in known:
            return f"Error: there is no tool {call.function.name!r}; known are {', '.join(known) or 'none'}."
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            return "Error: the arguments are not JSON."
        if not isinstance(arguments, dict):
            return "Error: the arguments are not a JSON object."
        if not self._calls_tools:
            return arguments
        return {"type": "call_tool", "tool_name": call.function.name, "arguments": arguments}

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._link.ask(message)
        except OpenEnvError as error:
            raise EnvironmentFailed(f"the environment of {self._url} has failed: {error}") from error


def _answer(call: ToolCall, text: str) -> ChatMessage:
    return ChatMessage(role="tool", content=(TextPart(text=text),), tool_call_id=call.id, name=call.function.name)


def _act_tool(schema: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    required = [name for name in schema.get("required", ()) if name in fields]
    parameters = {"type": "object", "properties": dict(fields), "required": required}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    described = str(schema.get("description") or "Act in the environment.").strip()
    return {"type": "function", "function": {"name": ACT, "description": described, "parameters": parameters}}


def _tool(listed: Mapping[str, Any]) -> dict[str, Any]:
    parameters = listed.get("input_schema") or {"type": "object", "properties": {}}
    about = {"name": listed["name"], "description": listed.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": about}
