"""Serves an environment in OpenEnv's protocol, for OpenEnv's clients and trainers.

One WebSocket is one session with its own environment; a broken connection ends the episode. `palestra_remote.app`
serves Palestra's protocol, which has several agents and several named rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal

import orjson
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.websockets import WebSocket, WebSocketDisconnect

from palestra.envs import ConcurrentEnvironment
from palestra.errors import Conflict, EpisodeOver, InvalidEnvironment, Unauthorized
from palestra.http.app import PUBLIC, build_app
from palestra.http.guard import bearer
from palestra.http.server import served
from palestra.types.messages import ChatMessage, FunctionCall, Observation, TextPart, ToolCall
from palestra.waiting import ordinary_errors
from palestra_remote.session import HeldEnvironment, Made, SessionLimits, error_line

log = logging.getLogger("palestra.env_server")
Tasks = Callable[[dict[str, Any]], dict[str, Any]]
_TITLE = "Palestra environment server, in OpenEnv's protocol"
_REFUSED = 1008  # close code of a WebSocket without the key
Code = Literal[
    "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR", "CAPACITY_REACHED", "FACTORY_ERROR"
]


class CallFields(BaseModel):
    """A tool call in an action."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="Name of the tool.")
    arguments: dict[str, Any] = Field({}, description="Its arguments, by name.")


class AgentAction(BaseModel):
    """An agent's reply and tool calls. Not named `Action`: OpenEnv's clients take that for an MCP server's."""

    model_config = ConfigDict(extra="forbid")

    message: str = Field(description="Text of the agent's reply; empty where it only calls tools.")
    tool_calls: list[CallFields] = Field([], description="Calls of tools of the observation.")
    metadata: dict[str, Any] = Field({}, description="Not looked at.")


class Shown(BaseModel):
    """An observation for the agent."""

    text: str = Field(description="The new messages of the agent's conversation, as one text.")
    messages: list[dict[str, Any]] = Field(description="The same as chat messages in OpenAI's shape.")
    tools: list[dict[str, Any]] = Field([], description="Tools that the agent may call, in OpenAI's shape.")
    choices: list[str] = Field([], description="Texts of which the next message has to be one; empty: any text.")


class State(BaseModel):
    """The progress of the episode."""

    episode_id: str | None = Field(None, description="As the client named it.")
    step_count: int = Field(0, description="Actions so far.")


class OpenEnvServer:
    """Creates a session for each WebSocket, at most `limits.sessions` at a time."""

    def __init__(
        self,
        make: Callable[[], Made],
        limits: SessionLimits | None = None,
        *,
        tasks: Tasks | None = None,
        description: str = "",
    ) -> None:
        """Create a server without sessions.

        Args:
            make: returns a new environment with one agent.
            limits: None: the defaults. Clients beyond the limit are refused, as in OpenEnv.
            tasks: makes a task from the arguments of `reset`; None: the arguments are the task.
        """
        self.limits = limits or SessionLimits()
        self._make, self._tasks = make, tasks or dict
        made = make()
        self.name = type(made).__name__
        self._description = description or (type(made).__doc__ or "").strip().partition("\n")[0]
        self._sessions: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    def app(self, key: str) -> FastAPI:
        """Return the application."""

        async def authenticate(request: Request) -> int:
            if not _opens(request, key):
                raise Unauthorized(
                    "no key, or one that is not this server's: give the client headers={'Authorization': …}"
                )
            return self.limits.max_message_bytes

        app = build_app(
            _TITLE, "Plays environments.", authenticate, self.limits.max_message_bytes, {*PUBLIC, "/health"}
        )

        @app.get("/health")
        async def health() -> dict[str, str]:
            """Say that the server runs."""
            return {"status": "healthy"}

        @app.get("/metadata")
        async def metadata() -> dict[str, str]:
            """Return the environment's name and purpose."""
            return {"name": self.name, "description": self._description}

        @app.get("/schema")
        async def schema() -> dict[str, Any]:
            """Return the JSON schemas of actions, observations and states."""
            kinds: dict[str, type[BaseModel]] = {"action": AgentAction, "observation": Shown, "state": State}
            return {name: kind.model_json_schema() for name, kind in kinds.items()}

        @app.post("/reset")
        @app.post("/step")
        async def without_session() -> None:
            """Refuse OpenEnv's requests without a session, each of which would create an environment."""
            raise Conflict("an episode is played over the WebSocket /ws; a request of its own has no session")

        @app.websocket("/ws")
        async def play(websocket: WebSocket) -> None:
            """Play episodes until the client disconnects."""
            with contextlib.suppress(WebSocketDisconnect):  # the client is gone already
                await websocket.accept()
                if not _opens(Request({**websocket.scope, "type": "http"}), key):
                    await websocket.close(_REFUSED, "no key, or one that is not this server's")
                    return
                await self._serve(websocket)

        return app

    @contextlib.asynccontextmanager
    async def served(self, key: str, listener: socket.socket) -> AsyncIterator[None]:
        """Serve inside the block; its end ends all sessions."""
        try:
            async with served(self.app(key), listener, websocket_bytes=self.limits.max_message_bytes):
                yield
        finally:
            await self.close()

    async def close(self) -> None:
        """End all sessions."""
        for task in list(self._sessions):
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    async def _serve(self, websocket: WebSocket) -> None:
        if len(self._sessions) >= self.limits.sessions:
            await _send(websocket, _error("CAPACITY_REACHED", f"all {self.limits.sessions} sessions are in use"))
            await websocket.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._sessions.add(task)
        session = _Session(self._make, self._tasks, self.limits)
        try:
            while True:
                async with asyncio.timeout(self.limits.idle_seconds):
                    text = await _receive(websocket)
                answer = await session.answer(text)
                if answer is None:
                    break
                await _send(websocket, answer)
            await websocket.close()
        except WebSocketDisconnect:
            return
        except TimeoutError:
            await websocket.close(reason=f"no message for {self.limits.idle_seconds:g} s")
        finally:
            try:
                await session.close()
            finally:
                self._sessions.discard(task)


class _Session:
    """One client's environment."""

    def __init__(self, make: Callable[[], Made], tasks: Tasks, limits: SessionLimits) -> None:
        self._held, self._tasks, self._limits = HeldEnvironment(make, limits, "a client"), tasks, limits
        self._open: Observation | None = None  # what waits for an action
        self._agent: str | None = None  # who is shown it
        self._state = State()

    async def answer(self, text: str) -> dict[str, Any] | None:
        """Return the answer to a message; None: the client ends the session."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            return _error("INVALID_JSON", f"the message is not JSON: {error}")
        kind = message.get("type") if isinstance(message, dict) else None
        data = message.get("data", {}) if isinstance(message, dict) else {}
        if kind == "close":
            return None
        if kind == "state":
            return {"type": "state", "data": self._state.model_dump()}
        if kind not in ("reset", "step"):
            return _error("UNKNOWN_TYPE", f"there is no message {kind!r}; there are reset, step, state and close")
        if not isinstance(data, dict):
            return _error("VALIDATION_ERROR", "`data` is an object")
        try:
            with ordinary_errors():
                async with asyncio.timeout(self._limits.hang_seconds):
                    action = None if kind == "reset" else AgentAction.model_validate(data)
                    seen = await (self._reset(data) if action is None else self._step(action))
        except ValidationError as error:
            first = error.errors()[0]
            return _error("VALIDATION_ERROR", f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        except TimeoutError:
            await self._fail()
            return _error("EXECUTION_ERROR", f"the environment was silent for {self._limits.hang_seconds:g} s")
        except Exception as error:  # noqa: BLE001 - the environment is the user's
            await self._fail()
            return _error("EXECUTION_ERROR", error_line(error))
        return {"type": "observation", "data": seen}

    async def close(self) -> None:
        """End the episode and close the environment."""
        await self._held.close()

    async def _fail(self) -> None:
        """Give the environment up: the next `reset` gets another one."""
        self._open = None
        await self.close()

    async def _reset(self, given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {name: value for name, value in given.items() if name != "episode_id" and value is not None}
        self._open, self._agent, self._state = None, None, State(episode_id=given.get("episode_id"))
        return await self._next(await self._held.reset(self._tasks(arguments)))

    async def _step(self, action: AgentAction) -> dict[str, Any]:
        environment, seen = self._held.present, self._open
        if environment is None or seen is None:
            raise Conflict("no episode waits for an action; send reset")
        calls = tuple(
            ToolCall(
                id=f"call-{self._state.step_count}-{number}",
                function=FunctionCall(name=call.name, arguments=orjson.dumps(call.arguments).decode()),
            )
            for number, call in enumerate(action.tool_calls)
        )
        content = (TextPart(text=action.message),) if action.message else ()
        self._open = None
        self._state.step_count += 1
        environment.act(seen.id, ChatMessage(role="assistant", content=content, tool_calls=calls))
        return await self._next(environment)

    async def _next(self, environment: ConcurrentEnvironment) -> dict[str, Any]:
        try:
            seen = await environment.observe()
        except EpisodeOver:
            raise InvalidEnvironment("the episode has ended without a last observation") from None
        await asyncio.sleep(0)  # for what has shown it to end
        self._agent = self._agent or seen.agent
        if seen.agent != self._agent:
            raise InvalidEnvironment(f"{seen.agent!r} plays beside {self._agent!r}; OpenEnv's protocol has one agent")
        if not seen.is_last:
            if not environment.waits_only_for(seen.id):
                raise InvalidEnvironment("several observations wait at the same time; OpenEnv's protocol has one agent")
            self._open = seen
        if seen.reward is not None and not isinstance(seen.reward, int | float):
            raise InvalidEnvironment("the reward is several by name; OpenEnv's protocol has one number")
        shown = Shown(
            text="\n\n".join(message.text for message in seen.content),
            messages=[message.model_dump(mode="json", exclude_none=True) for message in seen.content],
            tools=list(seen.tools),
            choices=list(seen.choices),
        )
        return {
            "observation": shown.model_dump(),
            "reward": seen.reward,
            "done": seen.is_last,
            "metadata": {"truncated": seen.truncated},
        }


def seeded_tasks(generate: Callable[[Literal["train"], int, int], list[dict[str, Any]]]) -> Tasks:
    """Return a function that makes tasks of `reset`'s arguments: generated ones of a seed, or what is given."""

    def task_of(given: dict[str, Any]) -> dict[str, Any]:
        if set(given) <= {"seed", "id"}:
            return generate("train", 1, int(given.get("seed", random.randrange(2**31))))[0]
        return given

    return task_of


def _opens(request: Request, key: str) -> bool:
    return hmac.compare_digest((bearer(request) or "").encode(), key.encode())


def _error(code: Code, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message[:2000]}}


async def _receive(websocket: WebSocket) -> str:
    """Return the text of the next message; empty, and so no JSON, where a client sends bytes."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"])
    return message.get("text") or ""


async def _send(websocket: WebSocket, message: Mapping[str, Any]) -> None:
    await websocket.send_text(orjson.dumps(message).decode())
