"""What is recorded of single steps of an episode beside its calls; workers have it, too, and no numpy."""

from __future__ import annotations

from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length"]


class AgentStepReward(NamedTuple):
    """What one agent has earned by an action, which may be another agent's.

    Attributes:
        time_step: of the action.
        agent: who has earned it.
        reward: how much.
    """

    time_step: int
    agent: str
    reward: float


class StepTimes(NamedTuple):
    """When an interaction with the environment happened, in Unix seconds.

    Attributes:
        observed_at: when the observation was made.
        acted_at: when the action was given; None: there was none.
    """

    observed_at: float
    acted_at: float | None
