"""The interface of an agent: a stateless way from an observation to an action."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from palestra.schemas.messages import ChatMessage, ToolChoice
from palestra.schemas.observations import Observation
from palestra.schemas.records import Chat


class PolicyHandle(Protocol):
    """The model, trained or frozen, as an agent sees it in one turn of one episode.

    An agent calls `chat` as often as it needs; each call is recorded in the episode.
    """

    @property
    def name(self) -> str:
        """Return the name of the policy, as the job's configuration has it."""
        ...

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """Return the agent's conversation before this observation: earlier observations and the agent's actions."""
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
        """Sample a reply of the model. When the call returns, the reply is recorded in the episode, token by token.

        Args:
            messages: the conversation to continue.
            tools: tools that the model may call, in OpenAI's shape.
            max_tokens: limit of the reply in tokens; None: as many as the job allows.
            choices: the reply is one of these texts: only their tokens can be sampled. Empty: any reply.
            tool_choice: "required": the reply is calls of `tools`: only their tokens can be sampled; "none": text that
                looks like a call stays text; "auto": the model decides.

        Returns:
            The recorded call; its `reply` is the model's message.
        """
        ...


class Agent(ABC):
    """A way to answer observations with a model.

    An agent keeps no state from turn to turn, so that one agent plays any number of episodes at the same time; the
    conversation is in `policy.history`.
    """

    @abstractmethod
    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Answer an observation.

        Args:
            observation: what the environment shows the agent now; `observation.content` continues `policy.history`.
            policy: the model.

        Returns:
            The model calls of this TimeStep (one, or several: a summary first, then an action), and the action.
        """
