"""100 tool calls of 100 ms in one turn, through `ToolManager.execute_calls`; prints one JSON line."""

from __future__ import annotations

import asyncio
import json
import time

from palestra.tools import ToolManager, tool
from palestra.types.messages import FunctionCall, ToolCall

CALLS, SECONDS, ROUNDS = 100, 0.1, 5


@tool
def blocking(seconds: float) -> str:
    """Block a thread."""
    time.sleep(seconds)
    return "done"


@tool
async def waiting(seconds: float) -> str:
    """Wait on the event loop."""
    await asyncio.sleep(seconds)
    return "done"


async def run(name: str) -> list[float]:
    """Milliseconds of each turn; all calls have to work."""
    manager = ToolManager([blocking, waiting])
    text = json.dumps({"seconds": SECONDS})
    calls = [ToolCall(id=f"c{n}", function=FunctionCall(name=name, arguments=text)) for n in range(CALLS)]
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        results = await manager.execute_calls(calls)
        found.append(1e3 * (time.perf_counter() - begin))
        if any(result.failure or result.content != "done" for result in results):
            raise SystemExit(f"a call failed: {results[0]}")
    return found


if __name__ == "__main__":
    print(json.dumps({name: asyncio.run(run(name)) for name in ("blocking", "waiting")}))
