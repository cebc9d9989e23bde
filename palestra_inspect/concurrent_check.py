"""The part of `check_environment` that is for concurrent environments, and the actions that all checks take."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.continuous import ContinuousEnvironment
from palestra.envs.multi_agent import MultiAgentEnvironment
from palestra.errors import EpisodeOver, InvalidEnvironment
from palestra.tools import FINISH
from palestra.types.messages import ChatMessage, FunctionCall, Observation, TextPart, ToolCall, text_message
from palestra_remote.observations import check_fields

TEXTS = ("", "hello", "1", '{"x": 1}', "é 漢 👩‍💻", "\ud800", "x" * 10_000)
_VALUES: dict[str, Any] = {"string": "1 + 1", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}

Task = Mapping[str, Any]
Script = Callable[[int, Sequence[Mapping[str, Any]], Sequence[str]], ChatMessage]
"""(number of actions that the agent has taken, tools that it is offered, choices that it has) -> its next action."""


def scripts(tasks: Sequence[Task], actions: Sequence[str | ChatMessage] | None) -> list[tuple[Task, Script]]:
    """Return the episodes to play, each as a task and the script of its actions.

    Without `actions` the first task is played once for each kind of action, beginning with it; if the environment gives
    choices, actions are legal ones.
    """
    if actions is not None:
        return [(task, _repeated([_message(action) for action in actions])) for task in tasks]
    kinds = len(TEXTS) + len(_calls([], 0))
    first = [(tasks[0], _rotated(start)) for start in range(kinds)]
    return first + [(task, _rotated(start)) for start, task in enumerate(tasks[1:], start=1)]


def _message(action: str | ChatMessage) -> ChatMessage:
    """Return the action as a message, with `?` for lone surrogates, as in a model's reply."""
    return text_message("assistant", action) if isinstance(action, str) else action


def _repeated(actions: Sequence[ChatMessage]) -> Script:
    return lambda number, tools, choices: actions[number % len(actions)]


def _rotated(start: int) -> Script:
    def action(number: int, tools: Sequence[Mapping[str, Any]], choices: Sequence[str]) -> ChatMessage:
        if choices and not tools:
            return _message(choices[(start + number) % len(choices)])
        kinds: list[ChatMessage] = [*(_calls(tools, number) if tools else ()), *map(_message, TEXTS)]
        return kinds[(start + number) % len(kinds)]

    return action


def _calls(tools: Sequence[Mapping[str, Any]], number: int) -> list[ChatMessage]:
    """Return actions that call: without arguments, with text that is not JSON, an unknown tool, and correctly."""
    names = [str(tool["function"]["name"]) for tool in tools]
    good = [(name, _arguments(tool)) for name, tool in zip(names, tools, strict=True) if name != FINISH]
    turns = [
        [(name, "{}") for name in names],
        [(name, '{"x": ') for name in names[:1]],
        [("no_such_tool", "{}")],
        good or [("no_such_tool", "{}")],
    ]
    return [_calling(turn, f"call_{number}") for turn in turns]


def _calling(turn: Sequence[tuple[str, str]], ids: str) -> ChatMessage:
    calls = [
        ToolCall(id=f"{ids}_{place}", function=FunctionCall(name=name, arguments=arguments))
        for place, (name, arguments) in enumerate(turn)
    ]
    return ChatMessage(role="assistant", content=(TextPart(text=""),), tool_calls=tuple(calls))


def _arguments(tool: Mapping[str, Any]) -> str:
    properties = (tool["function"].get("parameters") or {}).get("properties") or {}
    return json.dumps({name: _value(schema) for name, schema in properties.items()})


def _value(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    return schema["enum"][0] if schema.get("enum") else _VALUES.get(kind) if isinstance(kind, str) else None


# Observations by agent. Only their order within one agent is compared: between agents no order is promised.
Seen = dict[str, list[Any]]


async def check_concurrent(
    make: Callable[[], ConcurrentEnvironment],
    plan: Sequence[tuple[Task, Script]],
    max_steps: int,
    timeout_seconds: float,
    episode_of: Callable[..., CheckedEpisode],
    must_reward: bool,
) -> None:
    """Play the episodes of `plan` in concurrent environments; `check_environment` lists the mistakes.

    Args:
        max_steps: an episode with more actions counts as endless.
        timeout_seconds: limit for an environment to show an observation.
        must_reward: whether an environment of several agents must give a reward in one of the episodes.
    """
    fresh = []
    acted: Counter[str] = Counter()
    made: dict[int, ConcurrentEnvironment] = {}  # the environment of the last episode
    scored: list[bool] = []  # of each episode: whether a role had a reward, or the episode was cut

    async def played(task: Task, script: Script, last_first: bool = False) -> Seen:
        environment = made[0] = make()
        await _call("setup", environment.setup(), timeout_seconds)
        episode = episode_of(environment, script, max_steps, timeout_seconds, last_first)
        seen = await episode.play(task)
        acted.update(episode.acted)
        if isinstance(environment, MultiAgentEnvironment):
            scored.append(environment.has_scored or environment.cut_off)
        await _close(environment, timeout_seconds)
        return seen

    for task, script in plan:
        fresh.append(await played(task, script))
        if await played(task, script) != fresh[-1]:
            raise InvalidEnvironment(
                "two new environments answer the same task and actions differently; take randomness from the task"
            )
    if isinstance(several := made[0], MultiAgentEnvironment):
        _check_roles(several, acted)
        if must_reward and not any(scored):
            raise InvalidEnvironment(
                "no episode gave any role a reward, so that there is nothing to learn; return them in an Outcome, "
                f"as in Outcome(rewards={dict.fromkeys(several.roles[:2], 0.0)!r}, over=True), also where they are 0"
            )
        if several.deterministic and await played(*plan[0], last_first=True) != fresh[0]:
            raise InvalidEnvironment("an episode depends on which of several agents answers first")
    environment = make()
    await _call("setup", environment.setup(), timeout_seconds)
    if environment.reusable:
        again = [await episode_of(environment, s, max_steps, timeout_seconds).play(task) for task, s in (*plan, *plan)]
        if again != fresh + fresh:
            raise InvalidEnvironment("it says that it is reusable, and a second episode differs from that of a new one")
        await _close(environment, timeout_seconds)
        return
    await _call("reset", environment.reset(plan[0][0]), timeout_seconds)
    # An episode that is left in the middle must stop too: rollouts abandon episodes.
    await episode_of(environment, plan[0][1], 1, timeout_seconds).begin()
    await _close(environment, timeout_seconds)


def _check_roles(environment: MultiAgentEnvironment, acted: Mapping[str, int]) -> None:
    """Raise InvalidEnvironment for roles that act neither in played episodes nor in the protocol."""
    stages = environment.coordinator.stages
    named = {role for stage in stages if stage.kind != "decided" for role in stage.roles or environment.roles}
    for role in environment.roles:
        if role not in acted and role not in named:
            raise InvalidEnvironment(f"{role!r} never acts: no observation asked it for an action in any episode")


async def _close(environment: ConcurrentEnvironment, timeout_seconds: float) -> None:
    await _call("abandon", environment.abandon(), timeout_seconds)
    await _call("close", environment.close(), timeout_seconds)
    await check_nothing_left()


async def check_nothing_left() -> None:
    """Raise InvalidEnvironment if this event loop still runs another task than the caller's."""
    await asyncio.sleep(0)  # one turn of the loop lets cancelled tasks end
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        names = ", ".join(sorted(str(getattr(task.get_coro(), "__qualname__", task.get_name())) for task in left))
        raise InvalidEnvironment(f"after close this still runs: {names}")


class CheckedEpisode:
    """Plays one episode; checks and answers each observation as it arrives."""

    def __init__(
        self,
        environment: ConcurrentEnvironment,
        script: Script,
        max_steps: int,
        timeout_seconds: float,
        last_first: bool = False,
    ) -> None:
        self._environment, self._script, self._last_first = environment, script, last_first
        self._max_steps, self._timeout_seconds = max_steps, timeout_seconds
        self._ids: set[str] = set()
        self._seen: Seen = defaultdict(list)
        self.acted: Counter[str] = Counter()
        self._open: dict[str, Observation] = {}  # by agent: its unanswered observation
        self._done: set[str] = set()  # agents that have seen their last observation
        self._calls: dict[str, list[str]] = {}  # by agent: ids of the tool calls in its last action

    async def play(self, task: Task) -> Seen:
        """Play the episode of this task to its end and return all observations, by agent."""
        before = repr(task)
        await _call("reset", self._environment.reset(task), self._timeout_seconds)
        if repr(task) != before:
            raise InvalidEnvironment("reset changed the task; copy what has to be changed")
        while (observation := await self._next()) is not None:
            self._check(observation)
            if not observation.is_last:
                self._open[observation.agent] = observation
            if self.acted.total() > self._max_steps:
                raise InvalidEnvironment(
                    f"an episode did not end within {self._max_steps} steps; set max_steps, or truncate it"
                )
        if not self.acted:
            raise InvalidEnvironment("an episode began with nothing to answer; `start` emits what there is to see")
        return self._seen

    async def begin(self) -> None:
        """Answer the first observation and return without waiting for the next."""
        if (observation := await self._next()) is not None:
            self._act(observation)
            await asyncio.sleep(0)

    async def _next(self) -> Observation | None:
        """Return the next observation, None at the end; an agent acts only when no further observation is ready."""
        observing = asyncio.ensure_future(self._environment.observe())
        try:
            await asyncio.sleep(0)
            while self._open and not observing.done():
                first = next(reversed(self._open) if self._last_first else iter(self._open))
                self._act(self._open.pop(first))
                await asyncio.sleep(0)
            done, _ = await asyncio.wait((observing,), timeout=self._timeout_seconds)
            if not done:
                raise InvalidEnvironment(
                    f"nothing was shown for {self._timeout_seconds:g} s, and the episode is not over"
                )
            return cast("Observation", await _call("the answer to an action", observing, self._timeout_seconds))
        except EpisodeOver:
            return None
        finally:
            observing.cancel()

    def _act(self, observation: Observation) -> None:
        if self._environment.is_withdrawn(observation.id):  # an action of another agent has ended the episode
            return
        agent = observation.agent
        action = self._script(self.acted[agent], observation.tools, observation.choices)
        self.acted[agent] += 1
        self._calls[agent] = [call.id for call in action.tool_calls] if observation.tools else []
        self._environment.act(observation.id, action)

    def _check(self, observation: Observation) -> None:
        check_fields(observation)
        self._check_part(observation)
        agent, content = observation.agent, observation.content
        tools: tuple[Any, ...] = observation.tools
        if unknown := set(observation.parents) - self._ids:
            raise InvalidEnvironment(f"the parents of {observation.id} are {sorted(unknown)}, which nobody has seen")
        if not observation.is_last and not content and agent not in self._seen:
            raise InvalidEnvironment(f"the first that {agent!r} sees is nothing")
        if agent in self._open and not observation.is_last:
            raise InvalidEnvironment(f"{agent!r} is shown {observation.id} before it answered what it was shown before")
        for tool in tools:
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise InvalidEnvironment(f"a tool is offered in OpenAI's shape, and not as {tool!r:.80}")
        if not observation.is_last:
            self._check_conversation(observation)
        self._ids.add(observation.id)
        self._seen[agent].append((content, observation.reward, observation.terminated, observation.truncated))

    def _check_part(self, observation: Observation) -> None:
        """Check that an agent whose part has ended is neither asked nor rewarded."""
        agent = observation.agent
        if agent in self._done and not observation.is_last:
            raise InvalidEnvironment(f"{agent!r} is asked for an action, and its part had ended before")
        if agent in self._done and observation.reward is not None:
            raise InvalidEnvironment(f"{agent!r} gets a reward of {observation.reward} after its part had ended")
        if observation.is_last:
            self._done.add(agent)

    def _check_conversation(self, observation: Observation) -> None:
        """Check that exactly the calls of the agent's last action are answered in its next observation."""
        agent = observation.agent
        called = self._calls.pop(agent, [])
        answered = [message.tool_call_id for message in observation.content if message.role == "tool"]
        if missing := [call for call in called if call not in answered]:
            raise InvalidEnvironment(f"the call {missing[0]!r} of {agent!r} has no answer in what it sees next")
        if strange := [answer for answer in answered if answer not in called]:
            raise InvalidEnvironment(f"{agent!r} sees the result of a call {strange[0]!r} that it did not make")


async def _call(what: str, work: Awaitable[Any], timeout_seconds: float) -> Any:
    """Return the result of a method of an environment."""
    task, loop, late = asyncio.ensure_future(work), asyncio.get_running_loop(), threading.Event()

    def stop() -> None:
        late.set()
        task.cancel()

    timer = threading.Timer(timeout_seconds, loop.call_soon_threadsafe, (stop,))
    timer.daemon = True
    try:
        if not task.done():
            timer.start()
        return await task
    except (InvalidEnvironment, EpisodeOver):
        raise
    except Exception as error:
        raise InvalidEnvironment(f"{what} raised {type(error).__name__}: {error}") from error
    except asyncio.CancelledError:
        if not late.is_set():
            raise
        raise InvalidEnvironment(
            f"{what} was not over after {timeout_seconds:g} s; what one of its methods awaits may never come"
        ) from None
    finally:
        timer.cancel()


# Parts of a tick for which an agent thinks. No sum of some of them is a sum of others, or of whole ticks, so that the
# order of actions and ticks does not depend on how numbers are rounded.
_FIRST, _NEXT, _LONGER = math.sqrt(2) - 1, (math.sqrt(3) - 1) / 6, (math.sqrt(5) - 2) / 4
_KINDS = 3  # lengths of thinking, one after another


class TimedEpisode(CheckedEpisode):
    """Plays one episode of a world with a clock; each agent thinks for a fixed time."""

    def __init__(
        self,
        environment: ConcurrentEnvironment,
        script: Script,
        max_steps: int,
        timeout_seconds: float,
        last_first: bool = False,
    ) -> None:
        """Prepare an episode, to be played on an event loop of virtual time.

        Args:
            timeout_seconds: limit for the world to show an observation, if longer than the world lasts.
            last_first: whether agents asked last think for the shortest time.
        """
        self._world = cast("ContinuousEnvironment", environment)
        lasts = self._world.tick_seconds * self._world.ticks
        super().__init__(environment, script, max_steps, max(timeout_seconds, 2 * lasts), last_first)
        # In a world that lasts for long, agents think for longer, so that the actions are not too many.
        self._unit = max(self._world.tick_seconds, 4 * lasts * max(len(self._world.roles), 1) / max_steps)
        self._thinking: set[asyncio.Task[None]] = set()

    async def _next(self) -> Observation | None:
        while self._open:
            thinking = asyncio.ensure_future(self._answer(self._open.pop(next(iter(self._open)))))
            self._thinking.add(thinking)
            thinking.add_done_callback(self._thinking.discard)
        found = await super()._next()
        if found is None:
            for thinking in self._thinking:
                thinking.cancel()
        return found

    async def _answer(self, observation: Observation) -> None:
        """Answer an observation after the agent's thinking time, unless the world no longer waits for it."""
        roles = self._world.roles
        place = roles.index(observation.agent) if observation.agent in roles else len(roles)
        place = len(roles) - 1 - place if self._last_first else place
        longer = _LONGER * (self.acted[observation.agent] % _KINDS)
        await asyncio.sleep(self._unit * (_FIRST + _NEXT * place + longer))
        if not self._world.is_withdrawn(observation.id):
            self._act(observation)


def episodes_of(environment: ConcurrentEnvironment) -> Callable[..., CheckedEpisode]:
    """Return the class that plays a checked episode of this environment."""
    return TimedEpisode if isinstance(environment, ContinuousEnvironment) else CheckedEpisode
