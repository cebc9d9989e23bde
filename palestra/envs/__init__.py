"""Environments: what an agent interacts with. Loads neither torch nor ray."""

from palestra.envs.environment import Environment

__all__ = ["Environment"]
