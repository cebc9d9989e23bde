"""`ModelAgent`: the agent whose action is the model's reply, unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.agents.agent import Agent, PolicyHandle
from palestra.client.arguments import checked_count
from palestra.schemas.messages import ChatMessage, ToolChoice
from palestra.schemas.observations import Observation
from palestra.schemas.records import Chat


class ModelAgent(Agent):
    """Sends the whole conversation to the model and takes the reply as the action, tool calls included."""

    def __init__(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        choices: Sequence[str] = (),
        tool_choice: ToolChoice = "auto",
    ) -> None:
        """Create the agent.

        Args:
            tools: tools that are offered beside those of the observation, in OpenAI's shape.
            max_tokens: limit of each reply in tokens; None: as many as the job allows.
            choices: every reply is one of these texts, such as the moves of a game. Empty: any reply.
            tool_choice: "required": every reply calls tools; see `PolicyHandle.chat`.

        Raises:
            ConfigError: `max_tokens` is below 1.
        """
        if max_tokens is not None:
            checked_count("max_tokens", max_tokens)
        self._tools, self._max_tokens = tuple(tools), max_tokens
        self._choices, self._tool_choice = tuple(choices), tool_choice

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Sample one reply to the conversation, with this observation at its end, and return it as the action."""
        chat = await policy.chat(
            (*policy.history, *observation.content),
            tools=(*self._tools, *observation.tools),
            max_tokens=self._max_tokens,
            choices=self._choices,
            tool_choice=self._tool_choice,
        )
        return [chat], chat.reply
