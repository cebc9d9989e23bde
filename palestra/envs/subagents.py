"""A task whose agent may hand parts of it to subagents, which work side by side, each in a conversation of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.delegating import DELEGATE, Delegate, Subagent
from palestra.envs.final_answer import final_answer
from palestra.envs.rewards import finite_reward, reward_function
from palestra.envs.task import task_prompt
from palestra.schemas.clock import Clock
from palestra.schemas.messages import ChatMessage, text_message
from palestra.schemas.observations import Observation
from palestra.threads import call
from palestra.tools import Finish, Tool, ToolManager

SubagentReward = Callable[[Mapping[str, Any], str, str], float | Awaitable[float]]


@dataclass(kw_only=True, eq=False, slots=True)
class _Part:
    """What one agent does in the episode."""

    name: str
    kind: Subagent
    depth: int  # 0: the task's own agent
    prompt: str
    parent: _Part | None
    manager: ToolManager = field(default_factory=ToolManager)
    observation: Observation | None = None  # that it was shown last
    steps: int = 0
    said: str = ""  # the last text that was not empty
    over: bool = False
    result: str = ""  # for its parent, when it is over
    started: Counter[str] = field(default_factory=Counter)  # subagents of its own, by kind
    unshown: int = 0  # subagents whose results it was not shown
    arrived: asyncio.Queue[_Part] = field(default_factory=asyncio.Queue)  # those that are over


class SubagentEnvironment(ConcurrentEnvironment):
    """An agent, its tools, and `delegate(prompt, kind)`: each call of a turn starts a subagent of its own.

    A subagent is over when it replies without a call, calls `finish`, or has made its `max_steps` steps; its result
    is what it said. The agent is told in one of two ways.

    `results="together"`: once, when all subagents of the turn are over, in the order of the calls.

    `results="each"`: whenever one is over, and not before the agent has answered what it was shown before; one result
    an observation. Every call is answered in the observation that follows it, as OpenAI's form of a conversation
    demands: with the result, or with "is still at work". A result that comes later is a message of the user. As long as
    a subagent is at work, a reply without a call means that the agent waits, and only `finish` ends the episode.

    The episode ends when the agent replies without a call, calls `finish`, or has made `max_steps` steps (truncated).
    Subagents that are at work then are cut off: their tools are stopped, and a reply that is being sampled is the last.
    The last observation of a subagent is terminated; one that was cut off is truncated as well.

    `counts` has `started`, `too_deep`, `too_many` and `cut_off`; refusals are told to the model.
    """

    def __init__(
        self,
        subagents: Iterable[Subagent],
        reward_fn: Callable[..., Any],
        *,
        tools: Iterable[Tool] = (),
        subagent_reward_fn: SubagentReward | None = None,
        prompt: Callable[[Mapping[str, Any]], str] = task_prompt,
        system: str | None = None,
        results: Literal["together", "each"] = "together",
        max_steps: int = 8,
        max_depth: int = 1,
        max_agents: int = 16,
        timeout_seconds: float = 30.0,
        agent: str = "agent",
        clock: Clock | None = None,
    ) -> None:
        """Args:
            subagents: the kinds that there are.
            reward_fn: `(task, answer) -> float`, or in TRL's form, sync or async: the reward of the task's own agent.
            tools: of the task's own agent.
            subagent_reward_fn: `(task, prompt, answer) -> float`: the reward of each subagent that is over by itself or
                by its `max_steps`. None: they have none, and `credit = "agent"` or `"branch"` gives them their
                parent's. An episode's reward is the sum over its agents.
            prompt: what the agent is asked.
            system: the system message of its conversation.
            results: see above.
            max_steps: of the task's own agent; a kind of subagent has its own.
            max_depth: 1: subagents start none; 2: they may, and those may not; and so on.
            max_agents: subagents of one episode.
            timeout_seconds: of one call of a tool; a subagent may take any time.
            agent: name of the task's own agent.
            clock: tells when something was observed.

        Raises:
            ValueError: two kinds, or two tools of one agent, have the same name, or a limit makes no sense.
        """
        super().__init__(clock)
        kinds = list(subagents)
        self._kinds = {kind.name: kind for kind in kinds}
        if len(self._kinds) < len(kinds):
            raise ValueError("two kinds of subagents have the same name")
        if max_depth < 1 or max_agents < 0:
            raise ValueError("max_depth is at least 1, and max_agents at least 0")
        self._root = Subagent(name=agent, system=system, tools=tuple(tools), max_steps=max_steps)
        for kind in (self._root, *kinds):  # names that clash are found here, and not in an episode
            ToolManager([*kind.tools, Finish(), Delegate(self._kinds, lambda kind, prompt: "")])
        self._reward, self._subagent_reward = reward_function(reward_fn), subagent_reward_fn
        self._prompt, self._results = prompt, results
        self._max_depth, self._max_agents, self._timeout_seconds = max_depth, max_agents, timeout_seconds
        self._task: Mapping[str, Any] = {}
        self._parts: dict[str, _Part] = {}
        self.counts: Counter[str] = Counter()

    async def start(self, task: Mapping[str, Any]) -> None:
        """Ask the task's own agent."""
        self._task, self._parts = task, {}
        self.counts.clear()
        self._begin(self._root, self._prompt(task), None)

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Run the calls, start subagents and wait for them, or end the agent's part."""
        part = self._parts[observation.agent]
        if part.over:  # it was cut off while it answered
            self._last(part, truncated=True)
            return
        part.steps += 1
        part.said = action.text or part.said
        answer = final_answer(action)
        waits = answer is not None and not action.tool_calls and part.unshown > 0
        if answer is not None and not waits:
            await self._end(part, answer, truncated=False)
        elif part.steps >= part.kind.max_steps:
            await self._end(part, part.said, truncated=True)
        else:
            content, causes = await self._answers(part, action)
            self._show(part, content, (observation.id, *causes))

    def cancel(self, observation_id: str) -> None:
        """See `ConcurrentEnvironment`. A subagent that is cancelled is over, and its parent is told so."""
        super().cancel(observation_id)
        for part in self._parts.values():
            if part.observation is not None and part.observation.id == observation_id and not part.over:
                self._leave(part, "(no answer: cancelled)")

    def _begin(self, kind: Subagent, prompt: str, parent: _Part | None) -> _Part:
        """An agent's first observation."""
        name = kind.name
        if parent is not None:
            parent.started[kind.name] += 1
            name = f"{parent.name}/{kind.name}-{parent.started[kind.name]}"
        part = _Part(
            name=name, kind=kind, depth=0 if parent is None else parent.depth + 1, prompt=prompt, parent=parent
        )
        delegate = Delegate(self._kinds, lambda kind, prompt: self._delegated(part, kind, prompt))
        part.manager = ToolManager([*kind.tools, Finish(), delegate], timeout_seconds=self._timeout_seconds)
        self._parts[name] = part
        system = () if kind.system is None else (text_message("system", kind.system),)
        causes = () if parent is None or parent.observation is None else (parent.observation.id,)
        self._show(part, (*system, text_message("user", prompt)), causes)
        return part

    def _show(self, part: _Part, content: tuple[ChatMessage, ...], causes: tuple[str, ...]) -> None:
        """What asks an agent for an action. One that could call nothing but `finish` needs no tools to answer."""
        deep = part.depth >= self._max_depth or not self._kinds
        tools = tuple(tool for tool in part.manager.schemas if not deep or tool["function"]["name"] != DELEGATE)
        part.observation = self.emit(
            part.name, content, parents=causes, tools=tools if part.parent is None or len(tools) > 1 else ()
        )

    def _delegated(self, part: _Part, kind: Subagent, prompt: str) -> str:
        """Start a subagent; returns its name, or what the agent is told instead."""
        if part.depth >= self._max_depth:
            self.counts["too_deep"] += 1
            return "Error: you can't delegate; do it yourself."
        if len(self._parts) > self._max_agents:  # one of them is no subagent
            self.counts["too_many"] += 1
            return f"Error: not started; this task may have {self._max_agents} subagents, and has had them."
        self.counts["started"] += 1
        part.unshown += 1
        return self._begin(kind, prompt, part).name

    async def _answers(self, part: _Part, action: ChatMessage) -> tuple[tuple[ChatMessage, ...], tuple[str, ...]]:
        """What an action brings: the answers to its calls, results of subagents, and the observations behind those."""
        results = await part.manager.execute_calls(action.tool_calls)
        children = [self._parts.get(r.content) if r.name == DELEGATE and not r.failure else None for r in results]
        shown: list[_Part] = []
        started = sum(child is not None for child in children)
        if self._results == "together":
            shown = [await part.arrived.get() for _ in range(started)]
        elif part.unshown and (started or not action.tool_calls or not part.arrived.empty()):
            shown = [await part.arrived.get()]
        part.unshown -= len(shown)
        answers: list[ChatMessage] = []
        for result, child in zip(results, children, strict=True):
            said = result.content if child is None else _told(child, child in shown)
            answers.append(replace(result, content=said).message)
        later = [text_message("user", f"{c.name} has answered:\n{c.result}") for c in shown if c not in children]
        return (*answers, *later), tuple(c.observation.id for c in shown if c.observation is not None)

    async def _end(self, part: _Part, answer: str, truncated: bool) -> None:
        """An agent's part is over by itself, or by its limit of steps."""
        for other in self._parts.values():
            if other.name.startswith(f"{part.name}/"):
                self._cut(other)
        reward = await self._scored(part, answer)
        part.over = True
        part.result = answer
        if truncated:
            part.result += f"\n(Cut off after {part.kind.max_steps} steps; it may not be finished.)"
        self._last(part, truncated=truncated, reward=reward)
        if part.parent is not None:
            part.parent.arrived.put_nowait(part)

    async def _scored(self, part: _Part, answer: str) -> float | None:
        if part.parent is None:
            reward: float = await call(partial(self._reward, self._task, answer), "palestra-reward")
            return reward
        if self._subagent_reward is None:
            return None
        found = await call(partial(self._subagent_reward, self._task, part.prompt, answer), "palestra-reward")
        return finite_reward(self._subagent_reward, found)

    def _cut(self, part: _Part) -> None:
        """Nobody waits for this agent any more."""
        if part.over:
            return
        part.over = True
        self.counts["cut_off"] += 1
        if part.observation is not None and part.observation.id in self._open:
            return  # its reply is being sampled; `on_action` ends its part
        if part.observation is not None:
            super().cancel(part.observation.id)
        self._last(part, truncated=True)

    def _leave(self, part: _Part, result: str) -> None:
        """The rollout plays this agent no more."""
        part.over, part.result = True, result
        for other in self._parts.values():
            if other.name.startswith(f"{part.name}/"):
                self._cut(other)
        if part.parent is not None:
            part.parent.arrived.put_nowait(part)

    def _last(self, part: _Part, *, truncated: bool, reward: float | None = None) -> None:
        """The last observation of an agent; a subagent's part is terminated in any case."""
        causes = () if part.observation is None else (part.observation.id,)
        own = part.parent is None
        self.emit(part.name, (), parents=causes, reward=reward, terminated=not (own and truncated), truncated=truncated)


def _told(child: _Part, over: bool) -> str:
    return child.result if over else f"{child.name} is still at work."
