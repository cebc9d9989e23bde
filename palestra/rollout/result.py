"""The result of one episode: how it ended, and records other than model calls."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from palestra.client.plain_values import plain_object
from palestra.errors import (
    ConnectionLost,
    ContextOverflow,
    EngineFailure,
    EpisodeEnded,
    EpisodeForfeited,
    EpisodeLeaseExpired,
    EpisodeOver,
    InvalidRequest,
    JobOver,
    NotScored,
    PalestraError,
    RewardFailed,
    RolloutFailed,
    ServerStopping,
    place_of,
)
from palestra.types.calls import AgentStepReward, StepTimes
from palestra.types.messages import Observation, StepReward
from palestra.types.records import CONTEXT_FULL, FORFEIT, MAX_STEPS, UNUSED_CALLS, WITHOUT_POLICY
from palestra.types.states import SEAT_LOST, SEAT_UNCLAIMED
from palestra.types.wire import MAX_REWARD
from palestra.waiting import as_ordinary

LONGEST_SEEN = 4000  # characters of the last observations
LONGEST_INFO = 4000  # characters of an environment's information, over a whole episode


class Termination(StrEnum):
    """Why an episode ended.

    Only the first four have a reward; after the others the episode is retried or dropped.
    """

    DONE = "done"
    MAX_STEPS = MAX_STEPS  # truncated by the environment, usually by its limit of steps
    CONTEXT_FULL = CONTEXT_FULL  # an agent's conversation left no room for a reply
    FORFEIT = FORFEIT  # the environment has ended by an agent's action
    TIMED_OUT = "timed_out"
    ENVIRONMENT_FAILED = "environment_failed"
    AGENT_FAILED = "agent_failed"
    ENGINE_FAILED = "engine_failed"
    NOT_SCORED = "not_scored"  # a reward is None: the episode is left out, and not played again
    CANCELLED = "cancelled"  # the job was stopped
    SEAT_LOST = SEAT_LOST  # a worker has left its seat, and no other has taken it
    SEAT_UNCLAIMED = SEAT_UNCLAIMED  # no worker has come to a seat that had to act


@dataclass(kw_only=True, slots=True)
class Step:
    """One TimeStep: an observation that expected an action, the action's reward, and its time."""

    observation: Observation
    reward: float = 0.0
    acted_at: float | None = None  # Unix seconds; None: no action was given


@dataclass(kw_only=True, slots=True)
class EpisodeResult:
    """The outcome of an episode: how it ended, and records other than model calls."""

    termination: Termination = Termination.DONE
    steps: list[Step] = field(default_factory=list)  # in order of observation: TimeStep i is entry i
    rewards: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by agent
    named_rewards: dict[str, float | None] | None = None  # sums of agents that learn; None: none has names
    unnamed: bool = False  # whether such an agent has earned something without a name
    by_agent: list[AgentStepReward] = field(default_factory=list)  # what each has earned by an action, in order
    full_contexts: list[str] = field(default_factory=list)  # agents whose context had no room for a reply
    info: dict[str, str] = field(default_factory=dict)  # by TimeStep that caused it, or `reset`; see `note`
    without_policy: list[str] = field(default_factory=list)  # agents that were played by no policy
    unused_calls: list[int] = field(default_factory=list)  # see `SeatTable.unused_calls`
    forfeited: EpisodeForfeited | None = None  # what ended it, where that was an agent's action
    last_seen: str = ""  # text of last observations, which no model call contains

    def note(self, name: str, info: Mapping[str, Any]) -> None:
        """Record an environment's information for people, as short ASCII text, so that any object can be stored. `name`
        is the TimeStep that caused it, or `reset`.
        """
        left = LONGEST_INFO - sum(len(text) for other, text in self.info.items() if other != name)
        if left <= 0:
            return
        try:
            text = json.dumps(info, default=_shown)
        except (TypeError, ValueError, RecursionError):
            text = repr(info).encode("ascii", "backslashreplace").decode()
        text = f"{self.info[name]} {text}" if name in self.info else text
        self.info[name] = text if len(text) <= left else text[: max(left - 3, 0)] + "..."

    @property
    def step_rewards(self) -> list[float]:
        """Return the reward of each TimeStep, in order."""
        return [step.reward for step in self.steps]

    @property
    def agent_step_rewards(self) -> list[AgentStepReward] | None:
        """Return each agent's rewards for actions, in order; None: only one agent played."""
        agents = {step.observation.agent for step in self.steps} | self.rewards.keys()
        return self.by_agent if len(agents) > 1 else None

    @property
    def final_rewards(self) -> dict[str, float]:
        """Return the rewards by agent; without rewards, 0 for the agent that filled its context or acted first."""
        if self.rewards:
            return dict(self.rewards)
        acted = [step.observation.agent for step in self.steps] or ["agent"]
        full = self.full_contexts if self.termination is Termination.CONTEXT_FULL else []
        return {(full or acted)[-1 if full else 0]: 0.0}

    @property
    def step_times(self) -> list[StepTimes]:
        """Return the times of observation and action of each TimeStep, in order."""
        return [StepTimes(step.observation.observed_at, step.acted_at) for step in self.steps]

    @property
    def facts(self) -> dict[str, Any]:
        """Return the JSON to record about the episode, other than calls, rewards and times."""
        found: dict[str, Any] = {"termination": self.termination.value}
        if unanswered := sum(step.acted_at is None for step in self.steps):
            found["unanswered_observations"] = unanswered
        if self.full_contexts:
            found[CONTEXT_FULL] = self.full_contexts
        if self.info:
            found["info"] = self.info
        if self.without_policy:
            found[WITHOUT_POLICY] = self.without_policy
        if self.unused_calls:
            found[UNUSED_CALLS] = self.unused_calls
        if self.last_seen:
            found["last_seen"] = self.last_seen[:LONGEST_SEEN]
        return found

    def finite(self) -> Self:
        """Return the result unchanged if its rewards are in the range of rewards."""
        for value in (*self.rewards.values(), *self.step_rewards):
            if not abs(value) <= MAX_REWARD:
                text = f"its rewards add up to {value}, and a reward is from {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}"
                raise RolloutFailed(Termination.ENVIRONMENT_FAILED, text)
        return self

    def name(self, reward: StepReward) -> None:
        """Add a learning agent's reward to the episode's named rewards."""
        if not isinstance(reward, Mapping):
            self.unnamed = self.unnamed or reward != 0
            return
        named = self.named_rewards = self.named_rewards or {}
        for name, value in reward.items():
            before = named.get(name)
            named[name] = before if value is None else (before or 0.0) + value


def _shown(value: Any) -> Any:
    """Return a value of an environment's information in a form of JSON, or its `repr`."""
    try:
        return plain_object({"": value}, "info")[""]
    except InvalidRequest:
        return repr(value)


Lost = (EpisodeLeaseExpired, EpisodeEnded)  # the episode does not belong to this runner any more


class classify_errors:
    """Context manager that turns an exception into `RolloutFailed`, which names the failed component.

    Exceptions that end an episode regularly (`EpisodeOver`, `ContextOverflow`, `NotScored`) pass unchanged, and so does
    `JobOver`: another job that plays along has ended, so that no further episode can be played. After an
    agent's action, any exception that Palestra does not raise on purpose is a forfeit, because the action may have
    caused it. `EnvironmentFailed` means that the environment itself failed.
    """

    __slots__ = ("_acted", "_termination")

    def __init__(self, termination: Termination, *, acted: bool = False) -> None:
        self._termination, self._acted = termination, acted

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error := as_ordinary(error), Exception):
            return
        if isinstance(error, (EpisodeOver, ContextOverflow, NotScored, RolloutFailed, JobOver, *Lost)):
            return
        if self._acted and isinstance(error, EpisodeForfeited):
            return
        if self._acted and not isinstance(error, PalestraError):
            raise EpisodeForfeited(said(error)) from error
        if isinstance(error, RewardFailed) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        lost = isinstance(error, EngineFailure | ServerStopping | ConnectionLost)
        whose = Termination.ENGINE_FAILED if lost else self._termination
        raise RolloutFailed(whose, said(error)) from error


def said(error: Exception) -> str:
    """Return an error as one line with its type and position."""
    return f"{type(error).__name__}: {error}{place_of(error)}"
