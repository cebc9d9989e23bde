"""Agents by name, so that a job can use them without code of its own: in its process, and in `environment.runners`.

Other packages add theirs by entry points of the group `palestra.agents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from palestra.agents.agent import Agent, ToolAgent
from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension, nearest
from palestra.tools import Tool, load_tool

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
