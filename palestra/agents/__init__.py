"""Agents that Palestra plays itself, and the interface to write your own.

Importing this package loads neither torch nor ray, so that a rollout worker stays small.
"""

from palestra.agents.agent import Agent, ModelAgent, PolicyHandle, ToolAgent
from palestra.types.messages import ChatMessage, Observation, text_message
from palestra.types.records import Chat

__all__ = [
    "Agent",
    "Chat",
    "ChatMessage",
    "ModelAgent",
    "Observation",
    "PolicyHandle",
    "ToolAgent",
    "text_message",
]
