"""A task whose agent may delegate parts to subagents, which work concurrently, each in its own conversation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.environment import Prompt, prompt_messages, task_prompt
from palestra.envs.rewards import checked_reward, reward_function
from palestra.envs.tool_environment import final_answer
from palestra.threads import call
from palestra.tools import BadArguments, Finish, Tool, ToolManager
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage, Observation, StepReward, text_message

DELEGATE = "delegate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subagent:
    """A kind of subagent that an agent may start, any number of times, with the tool `delegate`."""

    name: str  # of the kind; the first that an agent named `agent` starts is `agent/NAME-1`
    description: str = ""  # its purpose, shown to agents that may delegate to it
    system: str | None = None  # system message of its conversation, if any
    tools: tuple[Tool, ...] = ()  # tools that it may call, beside `finish` and `delegate`
    max_steps: int = 8  # replies that it may make; its last text is then its result

    def __post_init__(self) -> None:
        """Check the name and the limit."""
        if not self.name or "/" in self.name:
            raise ValueError(f"a subagent's name has a letter and no slash, and is not {self.name!r}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps of {self.name!r} is at least 1")


class Delegate(Tool):
    """Tool `delegate(prompt, kind)`: one call starts one subagent; the calls of one reply start theirs concurrently."""

    def __init__(self, kinds: Mapping[str, Subagent], start: Callable[[Subagent, str], str]) -> None:
        """Create the tool of one agent. `start`: called with kind and prompt; returns the result of the call."""
        self._kinds, self._start = kinds, start

    def get_json_schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's shape. The argument `kind` is optional if there is only one kind."""
        about = " ".join(f"{kind.name}: {kind.description}" for kind in self._kinds.values() if kind.description)
        several = len(self._kinds) > 1
        properties = {
            "prompt": {"type": "string", "description": "All that it has to know."},
            "kind": {"type": "string", "enum": list(self._kinds)} | ({"description": about} if about else {}),
        }
        return {
            "type": "function",
            "function": {
                "name": DELEGATE,
                "description": "Hand a part of the task to a subagent. Several calls at once run side by side.",
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": ["prompt", "kind"] if several else ["prompt"],
                },
            },
        }

    async def apply_async(self, **arguments: Any) -> str:
        """Start a subagent and return the result of the call."""
        name = arguments.get("kind", next(iter(self._kinds), ""))
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise BadArguments(f"there is no subagent {name!r}; known are {', '.join(self._kinds) or 'none'}")
        prompt = arguments["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise BadArguments("the prompt is no text, or an empty one")
        return self._start(kind, prompt)


SubagentReward = Callable[[Mapping[str, Any], str, str], float | Awaitable[float]]


@dataclass(kw_only=True, eq=False, slots=True)
class _AgentState:
    """The state of one agent in the episode."""

    name: str
    kind: Subagent
    depth: int  # 0: the task's own agent
    prompt: str
    parent: _AgentState | None
    manager: ToolManager = field(default_factory=ToolManager)
    observation: Observation | None = None  # the last one that the agent was shown
    steps: int = 0
    said: str = ""  # the last text that was not empty
    over: bool = False
    result: str = ""  # shown to its parent when the agent is over
    started: Counter[str] = field(default_factory=Counter)  # its subagents so far, by kind
    unshown: int = 0  # subagents whose results the agent has not seen
    arrived: asyncio.Queue[_AgentState] = field(default_factory=asyncio.Queue)  # subagents that are over


class SubagentEnvironment(ConcurrentEnvironment):
    """A task, tools, and `delegate(prompt, kind)`: each call of that tool starts a subagent.

    A subagent has its own conversation. It is over when it replies without a call, calls `finish`, or reaches its
    `max_steps`; its last text, or the argument of `finish`, is its result. `results` decides when the parent reads it:

    - `"together"`: when all subagents of the reply are over, in the order of the calls.
    - `"each"`: as soon as one is over and the parent has answered its last observation, one result per observation.
      OpenAI's form of a conversation requires an answer to every call in the next observation, so the answer is
      either the result or "is still at work". A later result is a user message. While a subagent is at work, a
      reply without a call means that the parent waits, and only `finish` ends the episode.

    The episode ends when the task's own agent replies without a call, calls `finish`, or reaches `max_steps`
    (truncated). Running subagents are then cut off: their tools are stopped, and a reply that is being sampled is their
    last. The last observation of a subagent is terminated, and also truncated if the subagent was cut off.

    `counts` has the numbers of subagents by outcome: `started`, `too_deep`, `too_many` (both refused, with an error
    that the model reads) and `cut_off`.
    """

    def __init__(
        self,
        subagents: Iterable[Subagent],
        reward_fn: Callable[..., Any],
        *,
        tools: Iterable[Tool] = (),
        subagent_reward_fn: SubagentReward | None = None,
        prompt: Callable[[Mapping[str, Any]], Prompt] = task_prompt,
        system: str | None = None,
        results: Literal["together", "each"] = "together",
        max_steps: int = 8,
        max_depth: int = 1,
        max_agents: int = 16,
        timeout_seconds: float = 30.0,
        agent: str = "agent",
        clock: Clock | None = None,
    ) -> None:
        """Create the environment.

        Args:
            subagents: kinds of subagents that agents may start.
            reward_fn: reward of the task's own agent: `(task, answer) -> float`, or a function in TRL's form; sync or
                async.
            tools: tools of the task's own agent.
            subagent_reward_fn: `(task, prompt, answer) -> float`, the reward of each subagent that ended by itself or
                by its `max_steps`. None: subagents have no reward, and `credit = "agent"`, `"branch"` or `"step"` gives
                them their parent's. An episode's reward is the sum over its agents.
            prompt: returns the first message for the task's own agent.
            system: system message of the task's own agent, if any.
            results: when an agent reads its subagents' results; see above.
            max_steps: limit of replies of the task's own agent; each kind of subagent has its own limit.
            max_depth: levels of subagents: with 1 a subagent cannot start any, with 2 its subagents cannot, and so on.
            max_agents: limit of subagents started in one episode.
            timeout_seconds: limit for one tool call; a subagent has no time limit.
            agent: name of the task's own agent.
            clock: source of observation times; None: the system's clock.

        Raises:
            ValueError: two kinds, or two tools of one agent, have the same name; a server of tools is among the tools;
                or a limit is invalid.
        """
        super().__init__(clock)
        kinds = list(subagents)
        self._kinds = {kind.name: kind for kind in kinds}
        if len(self._kinds) < len(kinds):
            raise ValueError("two kinds of subagents have the same name")
        if max_depth < 1 or max_agents < 0:
            raise ValueError("max_depth is at least 1, and max_agents at least 0")
        self._root = Subagent(name=agent, system=system, tools=tuple(tools), max_steps=max_steps)
        # `ToolManager` refuses names that clash: raise that error now, and not in the first episode.
        for kind in (self._root, *kinds):
            made = ToolManager([*kind.tools, Finish(), Delegate(self._kinds, lambda kind, prompt: "")])
            if made.has_sources:
                raise ValueError("a server of tools can be given to `ToolEnvironment` alone, and not to subagents")
        self._reward, self._subagent_reward = reward_function(reward_fn), subagent_reward_fn
        self._prompt, self._results = prompt, results
        self._max_depth, self._max_agents, self._timeout_seconds = max_depth, max_agents, timeout_seconds
        self._task: Mapping[str, Any] = {}
        self._parts: dict[str, _AgentState] = {}
        self.counts: Counter[str] = Counter()

    async def start(self, task: Mapping[str, Any]) -> None:
        """Show the task to the task's own agent."""
        self._task, self._parts = task, {}
        self.counts.clear()
        self._begin(self._root, self._prompt(task), None)

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Run the action's tool calls and start its subagents, or end the agent's part if the action is an answer."""
        part = self._parts[observation.agent]
        if part.over:  # the agent was cut off while its reply was being sampled
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
        """Give up on an observation; a subagent that was to answer it is over, and its parent is told."""
        super().cancel(observation_id)
        for part in self._parts.values():
            if part.observation is not None and part.observation.id == observation_id and not part.over:
                self._leave(part, "(no answer: cancelled)")

    def _begin(self, kind: Subagent, prompt: Prompt, parent: _AgentState | None) -> _AgentState:
        """Create an agent and show it its first observation."""
        name = kind.name
        if parent is not None:
            parent.started[kind.name] += 1
            name = f"{parent.name}/{kind.name}-{parent.started[kind.name]}"
        asked = prompt_messages(prompt)
        part = _AgentState(
            name=name, kind=kind, depth=0 if parent is None else parent.depth + 1, prompt=asked[-1].text, parent=parent
        )
        delegate = Delegate(self._kinds, lambda kind, prompt: self._delegated(part, kind, prompt))
        part.manager = ToolManager([*kind.tools, Finish(), delegate], timeout_seconds=self._timeout_seconds)
        self._parts[name] = part
        own = kind.system is None or asked[0].role == "system"
        system = () if own else (text_message("system", str(kind.system)),)
        causes = () if parent is None or parent.observation is None else (parent.observation.id,)
        self._show(part, (*system, *asked), causes)
        return part

    def _show(self, part: _AgentState, content: tuple[ChatMessage, ...], causes: tuple[str, ...]) -> None:
        """Ask an agent for an action; a subagent that could only `finish` gets no tools: its text is its answer."""
        deep = part.depth >= self._max_depth or not self._kinds
        tools = tuple(tool for tool in part.manager.schemas if not deep or tool["function"]["name"] != DELEGATE)
        part.observation = self.emit(
            part.name, content, parents=causes, tools=tools if part.parent is None or len(tools) > 1 else ()
        )

    def _delegated(self, part: _AgentState, kind: Subagent, prompt: str) -> str:
        """Start a subagent and return its name, or return the error that the calling agent reads."""
        if part.depth >= self._max_depth:
            self.counts["too_deep"] += 1
            return "Error: you can't delegate; do it yourself."
        if len(self._parts) > self._max_agents:  # `_parts` holds the task's own agent as well
            self.counts["too_many"] += 1
            return f"Error: not started; this task may have {self._max_agents} subagents, and has had them."
        self.counts["started"] += 1
        part.unshown += 1
        return self._begin(kind, prompt, part).name

    async def _answers(self, part: _AgentState, action: ChatMessage) -> tuple[tuple[ChatMessage, ...], tuple[str, ...]]:
        """Run an action's calls; return their answers and the ids of the observations that caused them."""
        results = await part.manager.execute_calls(action.tool_calls)
        children = [self._parts.get(r.content) if r.name == DELEGATE and not r.failure else None for r in results]
        shown: list[_AgentState] = []
        started = sum(child is not None for child in children)
        if self._results == "together":
            shown = [await part.arrived.get() for _ in range(started)]
        elif part.unshown and (started or not action.tool_calls or not part.arrived.empty()):
            shown = [await part.arrived.get()]
        part.unshown -= len(shown)
        answers: list[ChatMessage] = []
        for result, child in zip(results, children, strict=True):
            said = result.content if child is None else _result_text(child, child in shown)
            answers.append(replace(result, content=said).message)
        later = [text_message("user", f"{c.name} has answered:\n{c.result}") for c in shown if c not in children]
        return (*answers, *later), tuple(c.observation.id for c in shown if c.observation is not None)

    async def _end(self, part: _AgentState, answer: str, truncated: bool) -> None:
        """End an agent's part by its answer or limit of steps: cut off its subagents, score it, notify its parent."""
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

    async def _scored(self, part: _AgentState, answer: str) -> StepReward | None:
        if part.parent is None:
            own = [one for one in self.calls if one.agent == part.name]
            reward: StepReward = await call(partial(self._reward, self._task, answer, own), "palestra-reward")
            return reward
        if self._subagent_reward is None:
            return None
        found = await call(partial(self._subagent_reward, self._task, part.prompt, answer), "palestra-reward")
        return checked_reward(self._subagent_reward, found)

    def _cut(self, part: _AgentState) -> None:
        """Cut off an agent whose result is no longer needed."""
        if part.over:
            return
        part.over = True
        self.counts["cut_off"] += 1
        if part.observation is not None and part.observation.id in self._open:
            return  # a reply is being sampled; `on_action` emits the last observation when it arrives
        if part.observation is not None:
            super().cancel(part.observation.id)
        self._last(part, truncated=True)

    def _leave(self, part: _AgentState, result: str) -> None:
        """End the part of an agent whose observation the rollout has cancelled."""
        part.over, part.result = True, result
        for other in self._parts.values():
            if other.name.startswith(f"{part.name}/"):
                self._cut(other)
        if part.parent is not None:
            part.parent.arrived.put_nowait(part)

    def _last(self, part: _AgentState, *, truncated: bool, reward: StepReward | None = None) -> None:
        """Emit an agent's last observation; a subagent's is always terminated."""
        causes = () if part.observation is None else (part.observation.id,)
        own = part.parent is None
        self.emit(part.name, (), parents=causes, reward=reward, terminated=not (own and truncated), truncated=truncated)


def _result_text(child: _AgentState, over: bool) -> str:
    return child.result if over else f"{child.name} is still at work."
