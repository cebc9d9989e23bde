"""Agents: stateless functions from an observation to an action, with a model and possibly tools."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from palestra.client.plain_values import checked_count
from palestra.errors import ConfigError, InvalidEnvironment
from palestra.extensions import extensions, load_extension, nearest
from palestra.tools import Tool, ToolManager, load_tool
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, Observation, TextPart, ToolCall, ToolChoice, text_message


class PolicyHandle(Protocol):
    """The model, trained or frozen, in one turn of one episode.

    An agent calls `chat` as often as it needs; each call is recorded in the episode.
    """

    @property
    def name(self) -> str:
        """Return the name of the policy in the job's configuration."""
        ...

    @property
    def seed(self) -> int:
        """Return a seed for random choices of this TimeStep; it is the same when the episode is repeated."""
        ...

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """Return the conversation before this observation: earlier observations and the agent's actions."""
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
        """Sample a reply of the model, and record it in the episode, token by token, before returning.

        Args:
            messages: the conversation to continue.
            tools: tools that the model may call, in OpenAI's format.
            max_tokens: limit of the reply in tokens; None: the job's limit.
            choices: constrain the reply to one of these texts. Empty: any reply.
            tool_choice: "required": constrain the reply to calls of `tools`; "none": text that looks like a call stays
                text; "auto": the model decides.

        Returns:
            The recorded call; its `reply` is the model's message.
        """
        ...


class Agent(ABC):
    """Answers observations with a model.

    Agents keep no state between turns, so one agent plays any number of episodes at the same time; `policy.history` has
    the conversation.

    Attributes:
        may_choose: whether replies may be constrained to finitely many choices, as some algorithms need.
        asks_policy: whether the agent calls its policy; False: its rewards do not train the policy.
    """

    may_choose: bool = True
    asks_policy: bool = True

    @abstractmethod
    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Answer an observation.

        Args:
            observation: `observation.content` continues `policy.history`.
            policy: the model.

        Returns:
            The model calls of this TimeStep (one, or several: a summary first, then an action), and the action.
        """


class ModelAgent(Agent):
    """Samples one reply to the whole conversation and returns it as the action, tool calls included."""

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
            tools: offered in addition to the observation's tools, in OpenAI's format.
            max_tokens: limit of each reply in tokens; None: the job's limit.
            choices: constrain every reply to one of these texts, such as the moves of a game. Empty: the observation's
                choices, if it has some and no tools are offered, else any reply.
            tool_choice: "required": every reply calls tools; see `PolicyHandle.chat`.

        Raises:
            ConfigError: `max_tokens` is below 1.
        """
        if max_tokens is not None:
            checked_count("max_tokens", max_tokens)
        self._tools, self._max_tokens = tuple(tools), max_tokens
        self._choices, self._tool_choice = tuple(choices), tool_choice
        self.may_choose = bool(self._choices)

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Sample one reply to the conversation with this observation, and return it as the action."""
        tools = (*self._tools, *observation.tools)
        chat = await policy.chat(
            (*policy.history, *observation.content),
            tools=tools,
            max_tokens=self._max_tokens,
            # Beside tools a reply can't be held to texts, so the environment has to refuse an illegal one itself.
            choices=self._choices or (() if tools else observation.choices),
            tool_choice=self._tool_choice,
        )
        return [chat], chat.reply


class ToolAgent(Agent):
    """Runs its own tools: the model may call them several times before the action of a TimeStep.

    The action is the first reply without calls of the agent's own tools, or the last of `max_calls` replies. If the
    environment offers a tool of the same name, the environment's is used. If a reply calls tools of both, the agent's
    are run, and the model is told to call the environment's alone, because an environment cannot answer half an action.
    """

    def __init__(
        self, tools: Iterable[Tool] | ToolManager, *, max_calls: int = 8, max_tokens: int | None = None
    ) -> None:
        """Create the agent.

        Args:
            tools: the agent's own tools, or a `ToolManager` with limits.
            max_calls: model calls in one TimeStep.
            max_tokens: limit of each reply in tokens; None: the job's limit.

        Raises:
            ValueError: two tools have the same name, `max_calls` is below 1, or a tool server is among the tools.
            ConfigError: `max_tokens` is below 1.
        """
        if max_tokens is not None:
            checked_count("max_tokens", max_tokens)
        if max_calls < 1:
            raise ValueError("max_calls is at least 1")
        self.manager = tools if isinstance(tools, ToolManager) else ToolManager(tools)
        if self.manager.has_sources:
            raise ValueError("an agent keeps nothing open between turns; give servers of tools to `ToolEnvironment`")
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self.may_choose = False

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
        results = {
            id(call): result for call, result in zip(mine, await self.manager.execute_calls([*mine]), strict=True)
        }
        return [results[id(call)].message if id(call) in results else _alone(call) for call in calls]


def _alone(call: ToolCall) -> ChatMessage:
    refusal = f"Error: not done; call {call.function.name} without other tools."
    return ChatMessage(role="tool", content=(TextPart(text=refusal),), tool_call_id=call.id, name=call.function.name)


Moves = Callable[[Observation], Sequence[str]]


class RandomAgent(Agent):
    """Plays a random legal move, determined by the job's seed, the episode, the agent and the TimeStep."""

    may_choose = False
    asks_policy = False

    def __init__(self, moves: Moves | None = None) -> None:
        """Create the agent.

        Args:
            moves: returns the legal moves of an observation, at least one; None: its `choices`.
        """
        self._moves = moves

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Return a legal move, without calling the policy."""
        moves = list(observation.choices if self._moves is None else self._moves(observation))
        if not moves:
            raise InvalidEnvironment(f"{observation.agent} has no legal move to draw one of")
        return [], text_message("assistant", random.Random(policy.seed).choice(moves))


GROUP = "palestra.agents"  # entry points of packages; each names an agent, or what makes one or several


def tool_agent(tools: str, max_calls: int = 8) -> ToolAgent:
    """Return an agent with installed tools.

    Args:
        tools: names of tools that ship with Palestra or installed packages, separated by commas.
        max_calls: see `ToolAgent`.

    Raises:
        ConfigError: a tool is unknown, or is a server of tools.
        ValueError: see `ToolAgent`.
    """
    found = [load_tool(name.strip()) for name in tools.split(",")]
    own = [tool for tool in found if isinstance(tool, Tool)]
    if len(own) < len(found):
        raise ConfigError("an agent keeps nothing open between turns; servers of tools are for `ToolEnvironment`")
    return ToolAgent(own, max_calls=max_calls)


_SHIPPED: Mapping[str, Callable[..., Agent]] = {"tools": tool_agent}


def installed_agent(name: str) -> Any:
    """Return what an agent's name leads to: agents, or what makes them.

    Raises:
        ConfigError: there is no such agent; the message suggests a similar one.
    """
    if name in _SHIPPED:
        return _SHIPPED[name]
    others = extensions(GROUP)
    if name not in others:
        known = sorted({*_SHIPPED, *others})
        hint = nearest(name, known, "{!r}")
        raise ConfigError(f"environment.agent: there is no agent {name!r}{hint} (known are {', '.join(known)})")
    return load_extension(others[name])


def named_agents(name: str | None, settings: Mapping[str, Any]) -> Mapping[str, Agent] | None:
    """Return the agents of `environment.agent`, by role, as `RolloutSpec.agents` takes them.

    A package provides them by an entry point of the group `palestra.agents`: an `Agent`, a mapping of role to agent
    ("" plays every other role), or a class or function that makes either from the settings, given by keyword.

    Args:
        name: None: a `ModelAgent` plays every role.

    Raises:
        ConfigError: there is no such agent, a setting is wrong, or the entry point names no agent.
    """
    if name is None:
        return None
    found = installed_agent(name)
    if isinstance(found, type) or (callable(found) and not isinstance(found, Agent)):
        try:
            found = found(**settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment.agent_settings: agent {name!r}: {error}") from error
    elif settings:
        raise ConfigError(f"environment.agent_settings: agent {name!r} has no settings")
    agents = dict(found) if isinstance(found, Mapping) else {"": found}
    for role, agent in agents.items():
        if not isinstance(agent, Agent):
            raise ConfigError(f"environment.agent: {name!r} gives {role or 'every role'!r} a {type(agent).__name__}")
    return agents
