"""The agent that runs tools of its own before it acts."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.agents.agent import Agent, PolicyHandle
from palestra.client.arguments import checked_count
from palestra.schemas.messages import ChatMessage, TextPart, ToolCall
from palestra.schemas.observations import Observation
from palestra.schemas.records import Chat
from palestra.tools import Tool, ToolManager


class ToolAgent(Agent):
    """Several calls of the model in one TimeStep: its tools are run, and their results are shown to the model.

    The action is the first reply without a call, or with a call that only the environment can answer, or the last of
    `max_calls` replies. A tool of the environment goes before one of the agent's own with the same name. Where a reply
    calls both the agent's tools and the environment's, the former are run, and of the latter the model is told to call
    them alone: an action is answered by the environment as a whole.
    """

    def __init__(
        self, tools: Iterable[Tool] | ToolManager, *, max_calls: int = 8, max_tokens: int | None = None
    ) -> None:
        """Args:
            tools: the agent's own; a `ToolManager` has limits of its own.
            max_calls: of the model, in one TimeStep.
            max_tokens: of each reply; None: as many as the job allows.

        Raises:
            ValueError: two tools with one name, or no call is allowed.
            ConfigError: `max_tokens` is below 1.
        """
        if max_tokens is not None:
            checked_count("max_tokens", max_tokens)
        if max_calls < 1:
            raise ValueError("max_calls is at least 1")
        self.manager = tools if isinstance(tools, ToolManager) else ToolManager(tools)
        self._max_calls, self._max_tokens = max_calls, max_tokens

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """See `Agent`."""
        theirs = {tool["function"]["name"] for tool in observation.tools}
        own = tuple(tool for tool in self.manager.schemas if tool["function"]["name"] not in theirs)
        messages = (*policy.history, *observation.content)
        chats: list[Chat] = []
        while True:
            chat = await policy.chat(messages, tools=(*own, *observation.tools), max_tokens=self._max_tokens)
            chats.append(chat)
            calls = chat.reply.tool_calls
            mine = [call for call in calls if call.function.name not in theirs]
            if not mine or len(chats) == self._max_calls:
                return chats, chat.reply
            messages = (*messages, chat.reply, *await self._answers(calls, mine))

    async def _answers(self, calls: Iterable[ToolCall], mine: Iterable[ToolCall]) -> list[ChatMessage]:
        """One message for each call, in their order."""
        results = {
            id(call): result for call, result in zip(mine, await self.manager.execute_calls([*mine]), strict=True)
        }
        return [results[id(call)].message if id(call) in results else _alone(call) for call in calls]


def _alone(call: ToolCall) -> ChatMessage:
    told = f"Error: not done; call {call.function.name} without other tools."
    return ChatMessage(role="tool", content=(TextPart(text=told),), tool_call_id=call.id, name=call.function.name)
