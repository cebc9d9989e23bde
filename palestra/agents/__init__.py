"""Agents that Palestra runs itself, and the interface for your own.

Importing this package loads neither torch nor ray, so that a rollout worker stays small.
"""

from palestra.agents.agent import Agent, ModelAgent, PolicyHandle, RandomAgent, ToolAgent, installed_agent, named_agents
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, Observation, text_message

__all__ = [
    "Agent",
    "Chat",
    "ChatMessage",
    "ModelAgent",
    "Observation",
    "PolicyHandle",
    "RandomAgent",
    "ToolAgent",
    "installed_agent",
    "named_agents",
    "text_message",
]
