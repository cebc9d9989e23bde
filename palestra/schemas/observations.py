"""What an environment shows to an agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palestra.schemas.messages import ChatMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Something that happened in an environment, for one agent."""

    id: str  # unique in the episode
    parents: tuple[str, ...]  # the observations whose actions brought it; none: the episode's start
    agent: str  # who sees it; a subagent's name starts with its parent's: "planner/search"
    content: tuple[ChatMessage, ...]  # what is new to the agent's conversation
    tools: tuple[dict[str, Any], ...] = ()  # what it may call, in OpenAI's shape
    reward: float | None = None  # for the actions that brought it; None: not scored, which is not 0
    terminated: bool = False  # the agent's part is over: no action is asked for
    truncated: bool = False  # it was cut off, by a limit for instance; not the same as over
    observed_at: float = 0.0  # Unix seconds
    info: Mapping[str, Any] = field(default_factory=dict)  # for people; recorded with the episode, as text

    @property
    def is_last(self) -> bool:
        """Whether no action is asked for."""
        return self.terminated or self.truncated

    @property
    def tool_outputs(self) -> dict[str, str]:
        """What the agent's calls returned, by their ids: `{"tool_outputs": …}` for agents that want a dict."""
        return {message.tool_call_id or "": message.text for message in self.content if message.role == "tool"}
