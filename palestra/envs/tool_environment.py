"""A task with tools: calls are run, their results are shown, until the agent hands in an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.rewards import reward_function
from palestra.schemas.clock import Clock
from palestra.schemas.messages import ChatMessage, text_message
from palestra.schemas.observations import Observation
from palestra.threads import in_thread
from palestra.tools import FINISH, Finish, Tool, ToolManager


class ToolEnvironment(ConcurrentEnvironment):
    """Multi-turn. Ends when the agent calls `finish`, answers without a call, or has made `max_steps` steps.

    Then `reward_fn` scores the answer: that of `finish`, or what the agent said last. Results of tools come back as
    messages of the role `tool`, one for each call.
    """

    def __init__(
        self,
        tools: Iterable[Tool],
        reward_fn: Callable[..., Any],
        *,
        prompt: Callable[[Mapping[str, Any]], str] = lambda task: str(task["prompt"]),
        system: str | None = None,
        max_steps: int = 8,
        timeout_seconds: float = 30.0,
        agent: str = "agent",
        clock: Clock | None = None,
    ) -> None:
        """`reward_fn` is `(task, answer) -> float`, or in TRL's form; a tool may take `timeout_seconds`."""
        super().__init__(clock)
        self.manager = ToolManager([*tools, Finish()], timeout_seconds=timeout_seconds)
        self._reward, self._prompt, self._system = reward_function(reward_fn), prompt, system
        self._max_steps, self._agent = max_steps, agent
        self._task: Mapping[str, Any] = {}
        self._steps = 0

    async def start(self, task: Mapping[str, Any]) -> None:
        """Ask."""
        self._task, self._steps = task, 0
        system = () if self._system is None else (text_message("system", self._system),)
        self.emit(self._agent, (*system, text_message("user", self._prompt(task))), tools=self.manager.schemas)

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Run the calls, or score the answer."""
        self._steps += 1
        answer = _answer(action)
        if answer is None and self._steps < self._max_steps:
            results = await self.manager.execute_calls(action.tool_calls)
            messages = tuple(result.message for result in results)
            self.emit(self._agent, messages, parents=(observation.id,), tools=self.manager.schemas)
            return
        said = action.text if answer is None else answer
        reward = await in_thread(lambda: self._reward(self._task, said), "palestra-reward")
        self.emit(
            self._agent,
            (),
            parents=(observation.id,),
            reward=reward,
            terminated=answer is not None,
            truncated=answer is None,
        )


def _answer(action: ChatMessage) -> str | None:
    """What the agent hands in; None: it wants to go on."""
    if not action.tool_calls:
        return action.text
    for call in action.tool_calls:
        if call.function.name == FINISH:
            try:
                return str(json.loads(call.function.arguments)["answer"])
            except (ValueError, KeyError, TypeError, RecursionError):
                return None  # the manager tells the model what is wrong with it
    return None
