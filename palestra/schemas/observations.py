"""Observations: what an environment shows to an agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palestra.schemas.messages import ChatMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Something that happened in an environment, for one agent to answer with an action.

    Attributes:
        id: unique in the episode.
        parents: observations whose actions caused this one; (): the episode's start.
        agent: the agent that sees it; a subagent's name starts with its parent's, as in "planner/search".
        content: messages that are new to the agent's conversation.
        tools: tools that the agent may call, in OpenAI's shape.
        reward: for the actions that caused it; None: not scored, which is not the same as 0.
        terminated: the agent's part has ended, so no action is expected.
        truncated: the agent's part was cut off, by a limit for instance, which is not the same as ended.
        observed_at: Unix seconds.
        info: for people; recorded with the episode, as text.
    """

    id: str
    parents: tuple[str, ...]
    agent: str
    content: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    observed_at: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Return whether the agent's part has ended or was cut off, so that no action is expected."""
        return self.terminated or self.truncated

    @property
    def tool_outputs(self) -> dict[str, str]:
        """Return what the agent's tool calls returned, by call id:

        `{"tool_outputs": …}` for agents that want a dict.
        """
        return {message.tool_call_id or "": message.text for message in self.content if message.role == "tool"}
