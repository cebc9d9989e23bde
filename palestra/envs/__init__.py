"""Environments: what an agent interacts with. Loads neither torch nor ray."""

from palestra.envs.check import check_environment
from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.environment import Environment
from palestra.envs.serial import SerialEnvironment

__all__ = ["ConcurrentEnvironment", "Environment", "SerialEnvironment", "check_environment"]
