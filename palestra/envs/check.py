"""Tries an environment before an agent does, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from palestra.envs.environment import Environment
from palestra.envs.serial import checked_reset, checked_step
from palestra.errors import EnvironmentMistake

ACTIONS = ("", "hello", "1", '{"x": 1}', "é 漢 👩‍💻", "\ud800", "x" * 10_000)


def check_environment(
    make: Callable[[], Environment],
    tasks: Sequence[Mapping[str, Any]],
    actions: Sequence[str] = ACTIONS,
    max_steps: int = 1000,
) -> None:
    """Play some episodes with `actions` in turn, and look for the usual mistakes.

    That is: values of the wrong shape or type, a reward that is not finite, a task that was changed, an exception for
    an action that a model may well write, an episode that never ends, randomness that is not the task's, a second
    episode that depends on the first though the environment says that it is reusable, and `close` that fails.

    Args:
        make: makes a new environment.
        tasks: at least one.
        actions: what the agent says, over and over.
        max_steps: an episode with more is taken to be endless.

    Raises:
        EnvironmentMistake: the first mistake that was found, in words.
    """
    if not tasks:
        raise ValueError("check_environment needs a task")
    for task in tasks:
        first = _played(make(), task, actions, max_steps)
        if first != _played(make(), task, actions, max_steps):
            raise EnvironmentMistake(
                "two new environments answer the same task and actions differently; take randomness from the task"
            )
    environment = make()
    if environment.reusable:
        fresh = [_episode(make(), task, actions, max_steps) for task in tasks]
        again = [_episode(environment, task, actions, max_steps) for task in (*tasks, *tasks)]
        if again != fresh + fresh:
            raise EnvironmentMistake("it says that it is reusable, and a second episode differs from that of a new one")
        _call("close", environment.close)


def _played(environment: Environment, task: Mapping[str, Any], actions: Sequence[str], max_steps: int) -> list[Any]:
    _call("setup", environment.setup)
    seen = _episode(environment, task, actions, max_steps)
    _call("close", environment.close)
    return seen


def _episode(environment: Environment, task: Mapping[str, Any], actions: Sequence[str], max_steps: int) -> list[Any]:
    """Everything that was seen of one episode."""
    before = repr(task)
    text, _ = checked_reset(_call("reset", lambda: environment.reset(task)))
    if repr(task) != before:
        raise EnvironmentMistake("reset changed the task; copy what has to be changed")
    seen: list[Any] = [text]
    limit = environment.max_steps
    for number in range(max_steps if limit is None else min(limit, max_steps)):
        action = actions[number % len(actions)]
        answer = checked_step(_call(f"step({action[:20]!r})", partial(environment.step, action)))
        seen.append(answer[:4])
        if answer[2] or answer[3]:
            return seen
    if limit is None:
        raise EnvironmentMistake(f"an episode did not end within {max_steps} steps; set max_steps, or truncate it")
    return seen


def _call(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except EnvironmentMistake:
        raise
    except Exception as error:
        raise EnvironmentMistake(f"{what} raised {type(error).__name__}: {error}") from error
