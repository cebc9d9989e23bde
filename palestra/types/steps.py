"""Records of single steps of an episode; workers use them too, without numpy."""

from __future__ import annotations

from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length"]


class AgentStepReward(NamedTuple):
    """An agent's reward for an action, possibly of another agent.

    Attributes:
        time_step: of the action.
    """

    time_step: int
    agent: str
    reward: float


class StepTimes(NamedTuple):
    """Times of an interaction with the environment, in Unix seconds.

    Attributes:
        acted_at: when the action was given; None: there was none.
    """

    observed_at: float
    acted_at: float | None
