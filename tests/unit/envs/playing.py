"""Actions, and agents that play a concurrent environment without a model."""

from __future__ import annotations

import asyncio
import inspect
import json

from palestra.errors import EpisodeOver
from palestra.types.messages import ChatMessage, FunctionCall, TextPart, ToolCall, text_message


def says(text: str) -> ChatMessage:
    return text_message("assistant", text)


def calls(*wanted: tuple[str, dict], ids: str = "c", text: str = "") -> ChatMessage:
    """A turn that calls tools; call k has the id `{ids}{k}`."""
    made = [
        ToolCall(id=f"{ids}{k}", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        for k, (name, arguments) in enumerate(wanted)
    ]
    return ChatMessage(role="assistant", content=(TextPart(text=text),), tool_calls=tuple(made))


def delegates(*prompts: str, ids: str = "c", **more) -> ChatMessage:
    return calls(*[("delegate", {"prompt": prompt} | more) for prompt in prompts], ids=ids)


async def play(environment, task, agent):
    """Everything that was observed. `agent(observation)` is the action, or a coroutine that returns it."""
    await environment.reset(task)
    seen, turns = [], []

    async def turn(observation):
        action = agent(observation)
        environment.act(observation.id, await action if inspect.isawaitable(action) else action)

    try:
        while True:
            seen.append(await environment.observe())
            if not seen[-1].is_last:
                turns.append(asyncio.ensure_future(turn(seen[-1])))
    except EpisodeOver:
        await asyncio.gather(*turns)
        return seen


async def settle() -> None:
    """Let everything happen that needs no time."""
    for _ in range(30):
        await asyncio.sleep(0)


async def shown(environment) -> list:
    """What there is to see now."""
    found = []
    while True:
        observing = asyncio.ensure_future(environment.observe())
        await settle()
        if not observing.done():
            observing.cancel()
            return found
        try:
            found.append(observing.result())
        except EpisodeOver:
            return found
