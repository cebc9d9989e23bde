"""Environments that do not end by themselves: a terminal whose agent sends the command FLOOD, and two with faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time

from palestra.envs import Environment
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall
from palestra_screens import TerminalEnvironment

LONG = "$(head -c 3000 /dev/zero | tr '\\0' A)"
FLOODS = {
    "long lines": f"yes {LONG}",
    "long lines again and again": f"while :; do yes {LONG}; done",
    "no signal": "trap '' TERM INT HUP QUIT PIPE; while :; do sleep 0.01; done",
    "one endless line": "yes | tr -d '\\n'",
    "zeros": "cat /dev/zero",
    "a fork that keeps the terminal": f"(trap '' HUP; setsid yes {LONG} &); (setsid sleep 1000 &)",
    "false exit codes": "fd=${PROMPT_COMMAND##*&}; yes 1 >&$fd",
}
TASK = {"id": "t", "kind": "count", "prompt": "Count.", "files": {}, "begin": "", "expected": "7"}


def run(command: str) -> ChatMessage:
    call = ToolCall(id="c", function=FunctionCall(name="run", arguments=json.dumps({"command": command})))
    return ChatMessage(role="assistant", content=(), tool_calls=(call,))


class Flooded(TerminalEnvironment):
    """Its commands have a minute, so that the end of a server comes in the middle of one."""

    def __init__(self) -> None:
        super().__init__(command_seconds=60.0)

    async def start(self, task):
        return await super().start(TASK)

    async def step_message(self, action):
        return await super().step_message(run(os.environ["FLOOD"]))


class Waits(Environment):
    """Waits for a thread that does not return."""

    def reset(self, task):
        return "begin", {}

    async def step(self, action):
        await asyncio.to_thread(time.sleep, 120)


class Clings(Waits):
    """Catches every cancellation, and closes as badly."""

    async def step(self, action):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(120)

    async def close(self):
        await self.step("")
