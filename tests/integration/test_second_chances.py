"""A model that breaks its environment gains nothing by it; attempts that were played again are said with the score."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from palestra import Environment, JobConfig, evaluate
from palestra.envs import ConcurrentEnvironment, SerialEnvironment, catalog_entry
from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited, EpisodeOver
from palestra.types.messages import ChatMessage, FunctionCall, Observation, TextPart, ToolCall

CONFIG = JobConfig.model_validate(
    {"name": "v", "engine": {"kind": "fake"}, "policies": {"policy": {"model": "tiny-random", "max_context": 2048}}}
)
TEXTS = (
    "",
    "\0",
    "\x1b[2J",
    "\ud800",
    "9" * 5000,
    "nan",
    "1e999 1e999",
    "[" * 100_000,
    "-1 -1",
    "٣ ٣",
    "{}",
    "a" * 10**6,
)
SHIPPED = [
    "arithmetic",
    "calculator",
    "gomoku",
    "gomoku-duel",
    "frozen-lake",
    "kuhn-poker",
    "leduc-poker",
    "negotiation",
    "prisoners-dilemma",
    "subagents",
    "terminal",
    "desktop",
    "miniwob/enter-text",
    "gsm-symbolic",
]


class Voids(Environment):
    """Whoever guesses wrong breaks the world."""

    raised: type[Exception] = EnvironmentFailed

    def reset(self, task):
        self.right = int(task["id"]) % 2 == 0
        return "?", {}

    def step(self, action):
        if self.right:
            return "", 1.0, True, False, {}
        raise self.raised("the world broke")


@pytest.mark.slow
def test_what_a_model_voids_is_lost_and_what_was_played_again_is_said():
    class Broken(Voids):
        raised = KeyError

    tasks = [{"id": str(number)} for number in range(6)]
    lost = evaluate(None, tasks, CONFIG, environment=Broken, quiet=True)
    assert (lost.mean, lost.scored, lost.replays) == (0.5, 6, 0)

    class Recovers(Voids):
        tries = itertools.count()

        def step(self, action):
            self.right = self.right or next(self.tries) >= 3
            return super().step(action)

    found = evaluate(None, tasks, CONFIG, environment=Recovers, quiet=True)
    assert (found.mean, found.replays, sum(one.replays for one in found.outcomes)) == (1.0, 3, 3)
    assert "3 attempts were played again" in repr(found)


def hostile(schemas: tuple[dict[str, Any], ...]) -> list[ChatMessage]:
    """What a model may write to break an environment: texts, and calls of each tool with values of every kind."""
    replies = [ChatMessage(role="assistant", content=(TextPart(text=text),)) for text in TEXTS]
    values = [*TEXTS, -1, 10**30, 1e308, True, None, [], {}]
    for schema in schemas:
        function = schema["function"]
        names = [*(function["parameters"].get("properties") or {})]
        arguments = [json.dumps(dict.fromkeys(names, value)) for value in values]
        replies += [calls(function["name"], text) for text in (*arguments, "NaN", "[" * 5000, "{")]
    return [*replies, calls("no_such_tool", "{}")]


def calls(name: str, arguments: str) -> ChatMessage:
    call = ToolCall(id="c", function=FunctionCall(name=name, arguments=arguments))
    return ChatMessage(role="assistant", content=(), tool_calls=(call,))


async def earned(environment: ConcurrentEnvironment, task: Mapping[str, Any], replies: Iterator[ChatMessage]) -> float:
    """Play an episode with the next of these replies, and return what it earns; a forfeit as a rollout scores it."""
    total = 0.0
    await environment.reset(task)
    try:
        while True:
            seen: Observation = await environment.observe()
            total += float(seen.reward or 0.0)  # type: ignore[arg-type]
            if not seen.is_last:
                environment.act(seen.id, next(replies))
    except (EpisodeOver, StopIteration):
        return total
    except EpisodeForfeited:
        return min(total, environment.forfeit_reward)
    finally:
        await environment.abandon()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
async def test_no_reply_voids_an_episode_of_an_environment_that_ships(name):
    """Each ends in good order or as a forfeit, never by `EnvironmentFailed`, and earns no more than any answer does."""
    entry = catalog_entry(name)  # outside of the block below: a name that does not exist is no reason to skip
    try:
        made = entry.make()
        tasks = entry.generate("train", 1, 0)
    except ConfigError as error:
        pytest.skip(str(error))
    environment = SerialEnvironment(made) if isinstance(made, Environment) else made
    environment.reusable = True  # type: ignore[misc]
    await environment.setup()
    try:
        await environment.reset(tasks[0])
        replies = hostile((await environment.observe()).tools)
        left = iter(replies)
        while (place := left.__length_hint__()) > 0:
            assert await earned(environment, tasks[0], left) <= 0.01, replies[-place]
    finally:
        await environment.close()
