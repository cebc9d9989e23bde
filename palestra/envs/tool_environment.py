"""A task with tools: calls are run, their results are shown, until the agent hands in an answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from palestra.envs.concurrent import ConcurrentEnvironment, is_default
from palestra.envs.environment import Prompt, prompt_messages, task_prompt
from palestra.envs.rewards import reward_failures, reward_function
from palestra.threads import call
from palestra.tools import FINISH, Finish, Tool, ToolManager, ToolResult, ToolSource
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage, Observation, StepReward, text_message


def final_answer(action: ChatMessage) -> str | None:
    """Return the final answer of an action: the argument of `finish`, or the text of an action without calls.

    None: the episode continues, because the action calls other tools, or calls `finish` with bad arguments.
    """
    if not action.tool_calls:
        return action.text
    for asked in action.tool_calls:
        if asked.function.name == FINISH:
            try:
                return str(json.loads(asked.function.arguments)["answer"])
            except (ValueError, KeyError, TypeError, RecursionError):
                # `ToolManager` shows the model an error for this call, and the model may try again.
                return None
    return None


class ToolEnvironment(ConcurrentEnvironment):
    """A multi-turn task with tools.

    The episode ends when the agent calls `finish`, answers without a call, or reaches `max_steps`. Then `score` rewards
    the answer: the argument of `finish`, or the agent's last text. Results of tools are messages with the role `tool`,
    one for each call; `Observation.tool_outputs` has them by call id.
    """

    def __init__(
        self,
        tools: Iterable[Tool | ToolSource],
        reward_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        *,
        prompt: Callable[[Mapping[str, Any]], Prompt] = task_prompt,
        system: str | None = None,
        max_steps: int = 8,
        timeout_seconds: float = 30.0,
        agent: str = "agent",
        clock: Clock | None = None,
    ) -> None:
        """Create the environment.

        Args:
            tools: tools that the agent may call, and servers of tools (`McpServer`); `finish` is added.
            reward_fn: `(task, answer) -> reward`, or a function in TRL's form, sync or async; or several, by name.
            prompt: returns the question of a task.
            system: system message of the agent's conversation, if any.
            max_steps: limit of the agent's replies in an episode.
            timeout_seconds: limit for one tool call.
            agent: name of the agent.
            clock: source of observation times; None: the system's clock.

        Raises:
            ValueError: two tools have the same name, or `max_steps` is below 1.
        """
        super().__init__(clock)
        if max_steps < 1:
            raise ValueError("max_steps is at least 1")
        self.manager = ToolManager([*tools, Finish()], timeout_seconds=timeout_seconds)
        self.max_steps = max_steps
        self.results: list[ToolResult] = []  # results of all calls of this episode
        self._reward, self._prompt, self._system = reward_function(reward_fn), prompt, system
        self._agent = agent
        self._task: Mapping[str, Any] = {}

    async def setup(self) -> None:
        """Open the servers of tools, if there are any.

        Raises:
            EnvironmentFailed: a server cannot be reached.
        """
        await self.manager.open()

    async def close(self) -> None:
        """End the episode's work, and close the servers of tools."""
        await self.abandon()
        await self.manager.close()

    async def start(self, task: Mapping[str, Any]) -> None:
        """Show the agent the task's question and its tools."""
        self._task, self.results = task, []
        system = () if self._system is None else (text_message("system", self._system),)
        asked = prompt_messages(self._prompt(task))
        own = asked[0].role == "system"
        self.emit(self._agent, asked if own else (*system, *asked), tools=self.manager.schemas)

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Run the action's calls and show their results, or score the answer and end the episode."""
        answer = final_answer(action)
        if answer is None and not self.cut_off:
            results = await self.manager.execute_calls(action.tool_calls)
            self.results += results
            await self.manager.refresh()  # a call may have changed which tools there are
            messages = tuple(result.message for result in results)
            paid = None
            if not is_default(self.score_results, ToolEnvironment.score_results):
                with reward_failures():
                    paid = await call(partial(self.score_results, self._task, results), "palestra-reward")
            self.emit(self._agent, messages, parents=(observation.id,), tools=self.manager.schemas, reward=paid)
            return
        said = action.text if answer is None else answer
        with reward_failures():
            reward = await call(partial(self.score, self._task, said), "palestra-reward")
        self.emit(self._agent, (), parents=(observation.id,), reward=reward, terminated=answer is not None)

    def score_results(
        self, task: Mapping[str, Any], results: Sequence[ToolResult]
    ) -> StepReward | Awaitable[StepReward | None] | None:
        """Return the reward of the results of a reply's calls, which adds to that of the answer; None, as here: they
        earn nothing. Override it to pay for what a tool has found; it runs as `score` does.
        """
        return None

    def score(self, task: Mapping[str, Any], answer: str) -> StepReward | Awaitable[StepReward]:
        """Return the reward of an answer, or several by name. Override it to score more than the answer.

        It runs in a thread and may block; an `async def` runs on the event loop.

        Args:
            task: the task of the episode.
            answer: the argument of `finish`, or the agent's last text. `self.results` has the results of all earlier
                calls.
        """
        return self._reward(task, answer, self.calls)
