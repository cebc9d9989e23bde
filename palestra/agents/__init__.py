"""Agents that Palestra plays itself. Loads neither torch nor ray."""

from palestra.agents.agent import Agent, PolicyHandle
from palestra.agents.model_agent import ModelAgent
from palestra.agents.tool_agent import ToolAgent

__all__ = ["Agent", "ModelAgent", "PolicyHandle", "ToolAgent"]
