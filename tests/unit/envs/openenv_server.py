"""A small server that speaks OpenEnv's protocol, with the faults that a test asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from palestra.http.server import listen, served, url_of

GUESS = {
    "title": "GuessAction",
    "properties": {"metadata": {"type": "object"}, "guess": {"type": "string"}},
    "required": ["guess"],
}
MOVE = {
    "title": "MoveAction",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
CALL = {"title": "CallToolAction", "properties": {"tool_name": {"type": "string"}}, "required": ["tool_name"]}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}


class OpenEnvFake:
    """Pays 1 for the guess `yes`, and ends with it; the third step ends as well."""

    def __init__(self, action: dict = GUESS, fault: str = "") -> None:
        self.action, self.fault = action, fault
        self.sessions, self.room = 0, 1_000
        self.resets: list[dict] = []

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/schema")
        async def schema():
            return JSONResponse({"action": self.action} if self.fault != "other" else {"pages": []})

        @app.websocket("/ws")
        async def ws(websocket: WebSocket):
            await websocket.accept()
            if self.sessions >= self.room:
                await websocket.send_json(error("CAPACITY_REACHED", "full"))
                await websocket.close()
                return
            self.sessions += 1
            try:
                await self.play(websocket)
            except WebSocketDisconnect:
                pass
            finally:
                self.sessions -= 1

        return app

    async def play(self, websocket: WebSocket) -> None:
        steps = 0
        while True:
            message = json.loads(await websocket.receive_text())
            kind, data = message["type"], message.get("data", {})
            if kind == "close":
                await websocket.close()
                return
            if kind == "state":
                await websocket.send_json({"type": "state", "data": {}})
            elif kind == "reset":
                steps = 0
                self.resets.append(data)
                await websocket.send_json(seen({"text": f"guess {data.get('seed')}", "metadata": {}}))
            elif self.fault == "drops" and steps == 1:
                await websocket.close(1011)
                return
            elif self.fault == "hangs":
                await asyncio.sleep(0.6)
            elif self.fault == "raises":
                await websocket.send_json(error("EXECUTION_ERROR", "ZeroDivisionError"))
            elif self.fault == "nonsense":
                await websocket.send_text("[1]")
            elif data.get("type") == "list_tools":
                await websocket.send_json(seen({"tools": [TOOL]}))
            elif data.get("guess") == "":
                await websocket.send_json(error("VALIDATION_ERROR", "guess: too short"))
            else:
                steps += 1
                won = data.get("guess") == "yes"
                reward = None if self.fault == "unpaid" else (1.0 if won else None if steps < 3 else 0.0)
                if self.fault == "nan":
                    reward = float("nan")
                await websocket.send_json(seen({"text": json.dumps(data)}, reward, done=won or steps == 3))


def seen(observation: dict, reward: float | None = None, *, done: bool = False) -> dict:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def error(code: str, message: str) -> dict:
    return {"type": "error", "data": {"code": code, "message": message}}


@contextlib.asynccontextmanager
async def openenv(action: dict = GUESS, fault: str = "") -> AsyncIterator[tuple[OpenEnvFake, str]]:
    fake, listener = OpenEnvFake(action, fault), listen("127.0.0.1", 0)
    async with served(fake.app(), listener, websocket_bytes=1 << 20):
        yield fake, url_of(listener)
