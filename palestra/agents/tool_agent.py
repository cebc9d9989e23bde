"""`ToolAgent`: the agent that runs tools of its own before it acts."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.agents.agent import Agent, PolicyHandle
from palestra.client.arguments import checked_count
from palestra.schemas.messages import ChatMessage, TextPart, ToolCall
from palestra.schemas.observations import Observation
from palestra.schemas.records import Chat
from palestra.tools import Tool, ToolManager


class ToolAgent(Agent):
    """Calls the model several times in one TimeStep: the agent's own tools are run, and the model reads their results.

    The action is the first reply that calls none of the agent's own tools, or the last of `max_calls` replies. If the
    environment offers a tool of the same name as one of the agent's, the environment's is used. If a reply calls tools
    of both, the agent's are run, and the model reads that it must call the environment's alone: the environment answers
    an action as a whole, so it can't be given half of one.
    """

    def __init__(
        self, tools: Iterable[Tool] | ToolManager, *, max_calls: int = 8, max_tokens: int | None = None
    ) -> None:
        """Create the agent.

        Args:
            tools: the agent's own tools, or a `ToolManager` with limits of its own.
            max_calls: model calls in one TimeStep.
            max_tokens: limit of each reply in tokens; None: as many as the job allows.

        Raises:
            ValueError: two tools have the same name, or `max_calls` is below 1.
            ConfigError: `max_tokens` is below 1.
        """
        if max_tokens is not None:
            checked_count("max_tokens", max_tokens)
        if max_calls < 1:
            raise ValueError("max_calls is at least 1")
        self.manager = tools if isinstance(tools, ToolManager) else ToolManager(tools)
        self._max_calls, self._max_tokens = max_calls, max_tokens

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Sample replies and run the agent's own tools until a reply is an action for the environment."""
        theirs = {tool["function"]["name"] for tool in observation.tools}
        own = tuple(tool for tool in self.manager.schemas if tool["function"]["name"] not in theirs)
        messages = (*policy.history, *observation.content)
        chats: list[Chat] = []
        while True:
            chat = await policy.chat(messages, tools=(*own, *observation.tools), max_tokens=self._max_tokens)
            chats.append(chat)
            calls = chat.reply.tool_calls
            mine = [call for call in calls if call.function.name not in theirs]
            # At the limit the reply is the action as it is: the environment answers calls that it does not know.
            # At the limit the reply is the action as it is: the environment answers calls that it does not know.
            if not mine or len(chats) == self._max_calls:
                return chats, chat.reply
            messages = (*messages, chat.reply, *await self._answers(calls, mine))

    async def _answers(self, calls: Iterable[ToolCall], mine: Iterable[ToolCall]) -> list[ChatMessage]:
        """Run the calls in `mine` and return one message for each call in `calls`, in their order."""
        # By object, not by the call's id: a model may write two calls with the same id.
        # By object, not by the call's id: a model may write two calls with the same id.
        results = {
            id(call): result for call, result in zip(mine, await self.manager.execute_calls([*mine]), strict=True)
        }
        return [results[id(call)].message if id(call) in results else _alone(call) for call in calls]


def _alone(call: ToolCall) -> ChatMessage:
    told = f"Error: not done; call {call.function.name} without other tools."
    return ChatMessage(role="tool", content=(TextPart(text=told),), tool_call_id=call.id, name=call.function.name)
