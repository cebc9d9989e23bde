"""The easy form of an environment: Gymnasium's five values, text in and out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Environment(ABC):
    """One episode's world. A new one is made for every episode."""

    @abstractmethod
    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Start with a task; returns the first observation, as the agent reads it, and information for people."""

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do what the agent said.

        Returns:
            Observation, reward of this step, terminated (the world is over), truncated (cut off, by a limit of steps
            for instance; not the same as over), information for people.
        """
