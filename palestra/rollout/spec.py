"""`RolloutSpec`: what to play, as agents and environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from palestra.agents import Agent
from palestra.client.arguments import checked_amount, checked_count
from palestra.envs.adapters import adapted
from palestra.rollout.environment_pool import Made


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """What to play: agents and environments.

    `environment` creates an environment for an episode; a reusable environment serves several episodes, one after
    another.
    """

    environment: Callable[[], Made]
    agents: Mapping[str, Agent] | None = None  # by name; None: a `ModelAgent` plays every agent
    system: str | None = None  # system message of the agent of an `Environment`; None: the environment's own
    max_tokens: int | None = None  # limit of each reply in tokens, if `agents` is None
    only_judged: bool = False  # whether the job's judge gives all rewards, so that what the environment gives is none
    temperature: float | None = None  # used where the job fixes no temperature: not in training, nor in validation

    def __post_init__(self) -> None:
        """Check the numbers, and adapt environments of other libraries."""
        object.__setattr__(self, "environment", adapted(self.environment))
        if self.max_tokens is not None:
            checked_count("max_tokens", self.max_tokens)
        if self.temperature is not None:
            checked_amount("temperature", self.temperature)
