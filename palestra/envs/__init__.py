"""Environments: what an agent interacts with. Loads neither torch nor ray."""

from palestra.envs.check import check_environment
from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.environment import Environment
from palestra.envs.gomoku import Gomoku
from palestra.envs.gymnasium_worlds import FrozenLake, GymnasiumEnvironment
from palestra.envs.reasoning import ReasoningEnvironment
from palestra.envs.rewards import reward_function
from palestra.envs.serial import SerialEnvironment
from palestra.envs.task import TaskEnvironment
from palestra.envs.tool_environment import ToolEnvironment

__all__ = [
    "ConcurrentEnvironment",
    "Environment",
    "FrozenLake",
    "Gomoku",
    "GymnasiumEnvironment",
    "ReasoningEnvironment",
    "SerialEnvironment",
    "TaskEnvironment",
    "ToolEnvironment",
    "check_environment",
    "reward_function",
]
