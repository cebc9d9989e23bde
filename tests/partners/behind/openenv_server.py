"""Environments served with OpenEnv's own server. Arguments: which, and the port."""

from __future__ import annotations

import os
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment


class CountAction(Action):
    add: int
    why: str


class GuessAction(Action):
    message: str


class Seen(Observation):
    text: str


class Guess(Environment):
    """Guess the number of the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._secret = State(episode_id=None, step_count=0), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs) -> Seen:
        self._state, self._secret = State(episode_id=episode_id, step_count=0), (seed or 0) % 10
        return Seen(text="Guess a digit.")

    def step(self, action: GuessAction, **kwargs) -> Seen:
        if action.message == "raise":
            raise KeyError("raise")
        if action.message == "exit":
            os._exit(1)
        if action.message == "hang":
            time.sleep(20)
        self._state.step_count += 1
        right = action.message.strip() == str(self._secret)
        return Seen(text="right" if right else "wrong", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return self._state


class Count(Guess):
    def step(self, action: CountAction, **kwargs) -> Seen:
        self._state.step_count += action.add
        total = self._state.step_count
        return Seen(text=str(total), reward=1.0 if total == 5 else None, done=total >= 5)


def tools_environment() -> type[Environment]:
    from fastmcp import FastMCP

    class Tools(MCPEnvironment):
        """A server of one tool."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            mcp = FastMCP("echo")

            @mcp.tool
            def echo(message: str) -> str:
                """Say it again."""
                return message

            super().__init__(mcp)
            self._state = State(episode_id=None, step_count=0)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs) -> Observation:
            return Observation(done=False, reward=0.0, metadata={"status": "ready"})

        def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs) -> Observation:
            return Observation(done=False, reward=0.0, metadata={"error": "unknown action"})

        @property
        def state(self) -> State:
            return self._state

    return Tools


def main(which: str, port: int) -> None:
    if which == "tools":
        from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

        app = create_fastapi_app(tools_environment(), CallToolAction, CallToolObservation, max_concurrent_envs=8)
    else:
        made, action = {"guess": (Guess, GuessAction), "count": (Count, CountAction)}[which]
        app = create_fastapi_app(made, action, Seen, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
