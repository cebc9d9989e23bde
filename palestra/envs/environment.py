"""The easy form of an environment: Gymnasium's five values, text in and out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar

from palestra.schemas.messages import ChatMessage

Info = dict[str, Any]
Reset = tuple[str, Info]
Step = tuple[str, float, bool, bool, Info]
StepMessage = tuple[str | tuple[ChatMessage, ...], float, bool, bool, Info]


class Environment(ABC):
    """One episode's world, in which one agent acts and the world answers.

    Each of its methods may be an `async def`, which is awaited on the event loop. Any other runs in a thread, unless
    `blocking` is False.
    """

    max_steps: int | None = None  # after so many steps the episode is truncated; None: no limit
    blocking: ClassVar[bool] = True  # whether methods that are not `async` may take long; if so they run in threads
    reusable: ClassVar[bool] = False  # whether `reset` may be called again; otherwise each episode gets a new one
    system: str | None = None  # the system message that the agent's conversation starts with; None: none
    tools: tuple[dict[str, Any], ...] = ()  # what the agent may call, in OpenAI's shape

    def setup(self) -> Awaitable[None] | None:  # noqa: B027 - nothing to do, unless there is
        """Prepare the first episode: connections, processes. May block."""

    def close(self) -> Awaitable[None] | None:  # noqa: B027
        """End what `setup` began, after the last episode, also after one that failed. May block."""

    @abstractmethod
    def reset(self, task: Mapping[str, Any]) -> Reset | Awaitable[Reset]:
        """Start with a task; returns the first observation, as the agent reads it, and information for people.

        The information is recorded with the episode (`palestra episodes RUN ID` shows it), 4,000 characters at most.
        """

    @abstractmethod
    def step(self, action: str) -> Step | Awaitable[Step]:
        """Do what the agent said.

        Returns:
            Observation, reward of this step, terminated (the world is over), truncated (cut off, by a limit of steps
            for instance; not the same as over), information for people.
        """

    def step_message(self, action: ChatMessage) -> StepMessage | Awaitable[StepMessage]:
        """The same with the whole message, tool calls included. Override this one to see or to send more than text."""
        return self.step(action.text)
