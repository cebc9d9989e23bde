"""`ActingEnvironment`: an agent acts on a page, a terminal or a window by tools, and sees the result."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from palestra.envs.environment import Environment, Info, Reset, Step, StepMessage
from palestra.envs.tool_environment import final_answer
from palestra.errors import EpisodeForfeited, InvalidEnvironment
from palestra.pictures.parts import parts_of
from palestra.tools import Finish, Tool, ToolFailure, ToolManager, ToolResult
from palestra.types.messages import ChatMessage, FunctionCall, StepReward, TextPart, ToolCall, text_message

Schema = dict[str, Any]


def command_call(text: str, schemas: Iterable[Schema]) -> ToolCall | None:
    """Return the tool call of the first line that begins with a tool's name; None: there is no such line.

    Words are arguments in the order of the tool's parameters; the last parameter takes the rest of the line.
    """
    tools = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" ")
        if (found := tools.get(name.lower())) is None:
            continue
        names = list(found.get("properties") or {})
        values = rest.strip().split(None, max(len(names) - 1, 0)) if rest.strip() else []
        arguments = json.dumps(dict(zip(names, values, strict=False)))
        return ToolCall(id="command", function=FunctionCall(name=name.lower(), arguments=arguments))
    return None


def commands_help(schemas: Iterable[Schema]) -> str:
    """Return one line per tool: its name, its parameters, and its description."""
    lines = []
    for schema in schemas:
        function = schema["function"]
        names = " ".join(name.upper() for name in function["parameters"].get("properties") or {})
        lines.append(f"{function['name']} {names}".strip() + f": {function['description']}")
    return "\n".join(lines)


MAX_CALLS = 16  # of one reply that are done
DONE = "done"  # what a tool returns that has nothing to say
Actions = Literal["tools", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The state of a task after an action."""

    reward: StepReward = 0.0  # of this action
    over: bool = False  # whether the task has ended


class ActingEnvironment(Environment):
    """An environment that executes the calls of a reply one after another, and then shows the state.

    Implement `start`, `observe`, `progress` and `check_alive`. An agent's mistake is answered with a text. An action
    that breaks the world ends the episode as a loss. Any other failure (`EnvironmentFailed`) fails the episode, which
    is retried without a reward.
    """

    reusable: ClassVar[bool] = True
    answers: ClassVar[bool] = True  # whether the agent may end the episode by calling `finish`

    def __init__(self, tools: Iterable[Tool], *, actions: Actions, max_steps: int, tool_seconds: float) -> None:
        """Create the environment.

        Args:
            tools: the agent's tools.
            actions: `tools`, tool calls; `text`, one line such as `click 3`, which small models write more easily.
            max_steps: limit of the agent's replies in an episode.
            tool_seconds: timeout of a call, which then is a forfeit: tools have limits of their own.

        Raises:
            ValueError: `max_steps` is below 1.
        """
        if max_steps < 1:
            raise ValueError("max_steps is at least 1")
        self.max_steps: int = max_steps
        self._steps = 0
        self._manager = ToolManager([*tools, *([Finish()] if self.answers else [])], timeout_seconds=tool_seconds)
        self._text_actions = actions == "text"
        if self._text_actions:
            self.system = "Reply with one line, which is one of:\n" + commands_help(self._manager.schemas)
        else:
            self.tools = self._manager.schemas

    # Methods that a subclass implements or overrides.

    @abstractmethod
    async def start(self, task: Mapping[str, Any]) -> str:
        """Begin the episode of `task` and return the agent's instructions."""

    @abstractmethod
    async def observe(self) -> Any:
        """Return the present state of the world, as text or picture; "": the results of the calls are enough.

        A picture is a Pillow image, an array, the bytes of a file, or a `Picture`.
        """

    @abstractmethod
    async def progress(self, answer: str | None) -> Progress:
        """Return the state of the task after an action.

        Args:
            answer: the argument of `finish`, which always ends the episode; None: it continues.
        """

    @abstractmethod
    def check_alive(self) -> None:
        """Check that the page, terminal or window still works.

        Raises:
            EpisodeForfeited: it does not, and an action may be the reason.
            EnvironmentFailed: it does not, and no action can be the reason; the episode is retried.
        """

    async def cut_off(self) -> StepReward:
        """Return the reward of the last action when an episode reaches `max_steps`; by default 0."""
        return 0.0

    def info(self) -> Info:
        """Return information for people about the last action; by default none."""
        return {}

    # Methods that a rollout calls.

    async def reset(self, task: Mapping[str, Any]) -> Reset:
        """Begin the episode of `task`, and return the agent's instructions and the state of the world."""
        self._steps = 0
        goal = await self.start(task)
        seen = await self.observe()
        return f"{goal}\n\n{seen}".strip() if isinstance(seen, str) else [goal, seen], {}

    async def step_message(self, action: ChatMessage) -> StepMessage:
        """Execute the calls of a reply one after another, and show the resulting state."""
        self.check_alive()
        self._steps += 1
        reward: StepReward = 0.0
        over = False
        results: list[ToolResult] = []
        for number, call in enumerate(action.tool_calls or self._command(action.text)):
            if over or number >= MAX_CALLS:
                results.append(_not_done(call, "the episode is over" if over else f"{MAX_CALLS} calls at a time"))
                continue
            (result,) = await self._manager.execute_calls([call])
            self.check_alive()
            if result.failure is ToolFailure.TIMED_OUT:
                raise EpisodeForfeited(result.content)
            results.append(result)
            answer = final_answer(ChatMessage(role="assistant", content=(), tool_calls=(call,)))
            after = await self.progress(answer)
            reward, over = _added(reward, after.reward), after.over or answer is not None
        cut_off = not over and self._steps >= self.max_steps
        if cut_off:
            reward = _added(reward, await self.cut_off())
        return await self._shown(action, results, over=over or cut_off), reward, over, cut_off, self.info()

    async def _shown(self, action: ChatMessage, results: list[ToolResult], *, over: bool) -> tuple[ChatMessage, ...]:
        """Return the results of calls, and the world as it is now unless the episode is over."""
        answers = tuple(result.message for result in results) if action.tool_calls else ()
        if over:
            return answers
        said = [result.content for result in results if not action.tool_calls and result.content != DONE]
        if not results:
            said = ["That is no action: " + ("reply with one line." if self._text_actions else "call a tool.")]
        shown = await self.observe()
        seen = "\n\n".join(text for text in (*said, *([shown] if isinstance(shown, str) else [])) if text)
        if not isinstance(shown, str):
            content = (*([TextPart(text=seen)] if seen else []), *parts_of(shown))
            return (*answers, ChatMessage(role="user", content=content))
        return (*answers, text_message("user", seen or DONE)) if seen or not answers else answers

    def _command(self, text: str) -> tuple[ToolCall, ...]:
        """Return the call that a line of text means, if actions are text."""
        call = command_call(text, self._manager.schemas) if self._text_actions else None
        return () if call is None else (call,)

    def step(self, action: str) -> Step:
        """Raise NotImplementedError: calls are part of a message, which `step_message` takes.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("an ActingEnvironment takes messages: call step_message")


def _added(before: StepReward, more: StepReward) -> StepReward:
    """Return the sum of rewards of one action, by name if they have names; a 0 without a name adds nothing to these."""
    if isinstance(before, Mapping) and isinstance(more, Mapping):
        both = [(name, before.get(name), more.get(name)) for name in {**before, **more}]
        return {name: b if a is None else a if b is None else a + b for name, a, b in both}
    if isinstance(before, Mapping) or isinstance(more, Mapping):
        if before and more:
            raise InvalidEnvironment(f"an action earned rewards with names and without: {before} and {more}")
        return before or more
    return before + more


def _not_done(call: ToolCall, reason: str) -> ToolResult:
    failure = ToolFailure.RAISED
    content = f"Error: not done: {reason}."
    return ToolResult(call_id=call.id, name=call.function.name, content=content, failure=failure, seconds=0.0)
