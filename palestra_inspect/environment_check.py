"""`check_environment`: tests an environment before training, and explains its mistakes."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from palestra.envs.catalog import adapted
from palestra.envs.concurrent import ConcurrentEnvironment, checked_reset, checked_step, step_call
from palestra.envs.continuous import ContinuousEnvironment, run_virtual
from palestra.envs.environment import Environment
from palestra.errors import InvalidEnvironment
from palestra.threads import call
from palestra.types.messages import ChatMessage
from palestra_inspect.concurrent_check import Script, Task, check_concurrent, check_nothing_left, episodes_of, scripts


def check_environment(
    make: Callable[[], Environment | ConcurrentEnvironment],
    tasks: Sequence[Mapping[str, Any]],
    actions: Sequence[str | ChatMessage] | None = None,
    max_steps: int = 1000,
    timeout_seconds: float = 60.0,
) -> None:
    """Play some episodes in an environment and raise the first mistake found.

    In any environment, these are mistakes:

    - `make` returns an environment that it returned before, or another object;
    - `setup`, `reset`, `step` or `close` raises, also for an action that a model may well write;
    - `reset` changes the task;
    - `max_steps` is less than 1;
    - an observation, a reward, `terminated`, `truncated` or `info` has the wrong shape or type, or a reward is not
      finite;
    - an episode does not end;
    - randomness does not come from the task: two new environments answer the same task and actions differently;
    - the environment is declared reusable, but its second episode differs from the first of a new environment;
    - tasks of the event loop still run after `close`.

    In a concurrent environment also:

    - an episode begins without an observation, or an agent's conversation without a message;
    - an agent gets a new observation before it has answered the last one, although it has only one conversation;
    - `parents` names an observation that does not exist;
    - a tool does not have OpenAI's shape;
    - a call has no answer in the next observation, or an answer belongs to no call;
    - an agent is asked for an action, or rewarded, after its part has ended;
    - observations stop, and the episode is not over;
    - `setup`, `reset` or `close` does not end.

    In an environment of several agents (`MultiAgentEnvironment`) also:

    - the episode waits for the action of an agent that gets no observation (deadlock);
    - a role never acts;
    - no episode gives any role a reward, not even 0, unless `actions` are given;
    - `zero_sum` is declared, and the rewards of an episode do not add up to `total`;
    - the environment is declared deterministic, but its episode depends on which agent answers first.

    A `ContinuousEnvironment` is played in virtual time, in which each agent thinks for a fixed time; two new ones must
    then behave alike. Waiting for anything other than timers, such as a thread, takes no virtual time.

    A warning is logged if a reply marked by `info["impossible"]` ends an episode with more reward than other replies
    earn: a model would learn such replies.

    Methods run as in a job: `async` ones on one event loop, those of a blocking `Environment` in threads.

    Args:
        make: returns a new environment each time.
        tasks: the tasks to play, at least one.
        actions: the actions of each agent, repeated in this order. None: legal ones if the environment gives choices;
            else various texts and, if there are tools, good and bad calls, and the first task is played with each of
            them as the first action.
        max_steps: an episode with more actions counts as endless.
        timeout_seconds: limit for a concurrent environment to show an observation, and for its `setup`, `reset` and
            `close`.

    Raises:
        InvalidEnvironment: describes the first mistake found.
        ValueError: `tasks` is empty, or `actions` is.
    """
    if not tasks or (actions is not None and not actions):
        raise ValueError("check_environment needs a task, and actions if they are given")
    make = adapted(make)
    made, other = _make(make), _make(make)
    if not isinstance(made, Environment | ConcurrentEnvironment):
        raise InvalidEnvironment(f"`make` returned a {type(made).__name__}, which is no environment")
    if made is other:
        raise InvalidEnvironment("`make` returned the same environment twice; an episode may need a new one")
    if made.max_steps is not None and made.max_steps < 1:
        raise InvalidEnvironment(f"max_steps is at least 1, or None, and not {made.max_steps}")
    plan = scripts(tasks, actions)
    if isinstance(made, ConcurrentEnvironment):
        concurrent = cast("Callable[[], ConcurrentEnvironment]", make)
        work = check_concurrent(concurrent, plan, max_steps, timeout_seconds, episodes_of(made), actions is None)
    else:
        work = _check_serial(cast("Callable[[], Environment]", make), plan, max_steps)
    _run_apart(work, run_virtual if isinstance(made, ContinuousEnvironment) else asyncio.run)


def _run_apart(work: Coroutine[Any, Any, None], run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Run a coroutine on an event loop of its own, in a thread: one of the caller's may be running in this one."""
    with ThreadPoolExecutor(1, "palestra-check") as thread:
        thread.submit(run, work).result()


async def _check_serial(make: Callable[[], Environment], plan: Sequence[tuple[Task, Script]], max_steps: int) -> None:
    fresh = []
    for task, script in plan:
        fresh.append(await _played(make(), task, script, max_steps))
        if fresh[-1] != await _played(make(), task, script, max_steps):
            raise InvalidEnvironment(
                "two new environments answer the same task and actions differently; take randomness from the task"
            )
    _warn_of_escapes([step for episode in fresh for step in episode[1:]])
    environment = make()
    if environment.reusable:
        await _call_of("setup", environment, environment.setup)
        again = [await _episode(environment, task, script, max_steps) for task, script in (*plan, *plan)]
        if again != fresh + fresh:
            raise InvalidEnvironment("it says that it is reusable, and a second episode differs from that of a new one")
        await _close(environment)


async def _played(environment: Environment, task: Task, script: Script, max_steps: int) -> list[Any]:
    await _call_of("setup", environment, environment.setup)
    seen = await _episode(environment, task, script, max_steps)
    await _close(environment)
    return seen


async def _close(environment: Environment) -> None:
    await _call_of("close", environment, environment.close)
    await check_nothing_left()


async def _episode(environment: Environment, task: Task, script: Script, max_steps: int) -> list[Any]:
    """Play one episode and return everything that the agent was shown in it, for comparison with another play."""
    before = repr(task)
    shown, _ = checked_reset(await _call_of("reset", environment, partial(environment.reset, task)))
    if repr(task) != before:
        raise InvalidEnvironment("reset changed the task; copy what has to be changed")
    seen: list[Any] = [shown]
    limit = environment.max_steps
    for number in range(max_steps if limit is None else min(limit, max_steps)):
        action = script(number, environment.tools, ())
        said = action.text[:20] if not action.tool_calls else action.tool_calls[0].function.name
        answer = checked_step(await _call_of(f"step({said!r})", environment, step_call(environment, action)))
        seen.append((*answer[:4], bool(answer[4].get("impossible"))))
        if answer[2] or answer[3]:
            return seen
    if limit is None:
        raise InvalidEnvironment(f"an episode did not end within {max_steps} steps; set max_steps, or truncate it")
    return seen


def _warn_of_escapes(steps: Sequence[Any]) -> None:
    """Warn where an impossible reply that ends the episode earns more than the mean of the possible ones."""

    def earned(reward: Any) -> float:
        return sum(one or 0.0 for one in reward.values()) if isinstance(reward, Mapping) else float(reward)

    played = [earned(reward) for _, reward, _, _, impossible in steps if not impossible]
    escapes = [earned(reward) for _, reward, ended, _, impossible in steps if impossible and ended]
    if played and escapes and max(escapes) > (mean := sum(played) / len(played)):
        warnings.warn(
            f"an impossible reply ends the episode with {max(escapes):g}, and a possible one earns {mean:g}: a model "
            "learns to reply so; pay less for it",
            stacklevel=2,
        )


def _make(make: Callable[[], Any]) -> Any:
    """Return a new environment."""
    try:
        return make()
    except InvalidEnvironment:
        raise
    except Exception as error:
        raise InvalidEnvironment(f"make raised {type(error).__name__}: {error}") from error


async def _call_of(what: str, environment: Environment, function: Callable[[], Any]) -> Any:
    """Return the result of a method of an environment, called as a job calls it."""
    try:
        return await call(function, "palestra-environment", blocking=environment.blocking)
    except InvalidEnvironment:
        raise
    except Exception as error:
        raise InvalidEnvironment(f"{what} raised {type(error).__name__}: {error}") from error
