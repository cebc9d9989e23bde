"""What an agent is: a stateless way from an observation to an action."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from palestra.schemas.messages import ChatMessage, ToolChoice
from palestra.schemas.observations import Observation
from palestra.schemas.records import Chat


class PolicyHandle(Protocol):
    """The model, for one turn of one agent in one episode."""

    @property
    def name(self) -> str:
        """Of the policy."""
        ...

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """The agent's conversation before this observation: what it saw, and what it did."""
        ...

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        choices: Sequence[str] = (),
        tool_choice: ToolChoice = "auto",
    ) -> Chat:
        """Sample a reply; recorded in the episode, token by token, when it returns.

        Args:
            messages: the conversation.
            tools: what the model may call, in OpenAI's shape.
            max_tokens: of the reply; None: as many as the job allows.
            choices: the reply is one of these, and only they are sampled from; none: anything.
            tool_choice: "required": the reply is calls of `tools`, and only they are sampled from; "none": what looks
                like a call stays text.
        """
        ...


class Agent(ABC):
    """Keeps nothing from turn to turn, so one agent plays any number of episodes at once."""

    @abstractmethod
    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Answer an observation.

        Returns:
            The calls that it took (a TimeStep may need several: a summary first, then an action), and the action.
        """
