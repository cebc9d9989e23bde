"""Agents that Palestra plays itself, and the interface to write your own.

Importing this package loads neither torch nor ray, so that a rollout worker stays small.
"""

from palestra.agents.agent import Agent, PolicyHandle
from palestra.agents.model_agent import ModelAgent
from palestra.agents.tool_agent import ToolAgent
from palestra.schemas.messages import ChatMessage, text_message
from palestra.schemas.observations import Observation
from palestra.schemas.records import Chat

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
