"""Credit assignment: the return that each call of an episode is credited with, and its baseline."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from palestra.algorithms.base import StepOrder
from palestra.types.records import Trajectory
from palestra.types.steps import StepTimes

CreditMode = Literal["episode", "step", "agent", "branch"]


class BaselineKey(NamedTuple):
    """Identifies calls of one episode that share one return.

    However many calls share it, the return counts once in the baseline.

    Attributes:
        baseline_group: keys with the same value, of all episodes of a group, share a baseline.
        name: distinguishes the keys of one episode: the number of a TimeStep, or the name of an agent.
    """

    baseline_group: str
    name: Hashable


@dataclass(frozen=True, kw_only=True, slots=True)
class Returns:
    """The returns of one episode.

    Attributes:
        values: the return, a reward or a discounted sum of rewards, by key.
        key_of: the key of each call, by the call's index.
    """

    values: dict[BaselineKey, float]
    key_of: dict[int, BaselineKey]


def episode_returns(
    trajectory: Trajectory, mode: CreditMode, discount: float, order: StepOrder = "observed"
) -> Returns:
    """Return the returns with which the calls of a completed episode are credited.

    Args:
        trajectory: a completed episode.
        mode: `episode`: the sum of all rewards; `step`: the discounted sum of the TimeSteps' rewards from the call's
            own on (Sutton and Barto 2018, equation 3.8); if TimeSteps have no rewards, the episode's reward counts as
            the last one's; `agent`: the reward of the call's agent, compared with those of the same agent; `branch`: as
            `agent`, but a subagent is compared with all that its parent started.
        discount: discount factor of one TimeStep, for `step`.
        order: order of the TimeSteps, for `step`: by their observations, or by their actions.

    Raises:
        ValueError: the episode has no reward.
    """
    rewards, chats = trajectory.episode.rewards, trajectory.chats
    if rewards is None:
        raise ValueError(f"episode {trajectory.episode.episode_id} has no reward")
    total = float(sum(rewards.values()))
    if mode == "episode":
        sole = BaselineKey("", None)
        return Returns(values={sole: total}, key_of={chat.index: sole for chat in chats})
    if mode == "step":
        returns = step_returns(trajectory, total, discount, order)
        return Returns(
            values={BaselineKey("", step): returns[step] for step in sorted({chat.time_step for chat in chats})},
            key_of={chat.index: BaselineKey("", chat.time_step) for chat in chats},
        )
    key_of = {
        chat.index: BaselineKey(_siblings(chat.agent) if mode == "branch" else chat.agent, chat.agent) for chat in chats
    }
    return Returns(
        values={key: agent_reward(str(key.name), rewards) for key in sorted(set(key_of.values()), key=str)},
        key_of=key_of,
    )


def agent_reward(agent: str, rewards: Mapping[str, float]) -> float:
    """Return the reward of an agent, or of its nearest parent that has one, or else the sum of all rewards.

    Args:
        agent: name of the agent; a subagent's begins with its parent's: `planner/search`.
        rewards: rewards by agent.
    """
    name = agent
    while name:
        if name in rewards:
            return rewards[name]
        name = name.rpartition("/")[0]
    return float(sum(rewards.values()))


def step_returns(trajectory: Trajectory, total: float, discount: float, order: StepOrder = "observed") -> list[float]:
    """Return G_t = r_t + discount x G_(t+1) for each TimeStep, where t counts TimeSteps in the given order.

    If several agents act at the same time, an action can't have earned a reward that came before it; with `acted`,
    TimeSteps are therefore ordered by the times of their actions. Without recorded times both orders are the TimeSteps'
    own.

    Args:
        trajectory: a completed episode.
        total: the episode's reward, used as the last TimeStep's if TimeSteps have none.
        discount: discount factor of one TimeStep.
        order: order of the TimeSteps.
    """
    place_of, rewards = step_places(trajectory, total, order)
    returns = [0.0] * len(rewards)
    following = 0.0
    for place in reversed(range(len(rewards))):
        following = returns[place] = rewards[place] + discount * following
    return [returns[place] for place in place_of]


def step_places(trajectory: Trajectory, total: float, order: StepOrder = "observed") -> tuple[list[int], list[float]]:
    """Return the place of each TimeStep in the order of time, and the rewards of the TimeSteps in that order.

    Args:
        trajectory: a completed episode.
        total: the episode's reward, used as the last TimeStep's if TimeSteps have none.
        order: order of the TimeSteps; see `step_returns`.
    """
    last = max((chat.time_step for chat in trajectory.chats), default=-1)
    rewards = trajectory.episode.step_rewards
    if rewards is None:
        rewards = (*[0.0] * last, total)
    steps = list(range(len(rewards)))
    times = trajectory.episode.step_times
    if order == "acted" and times is not None:
        steps.sort(key=lambda step: _acted_at(times[step] if step < len(times) else None))
    place_of = [0] * len(steps)
    for place, step in enumerate(steps):
        place_of[step] = place
    return place_of, [rewards[step] for step in steps]


def _siblings(agent: str) -> str:
    """Return `planner/` for `planner/search`, and the name itself for an agent without a parent."""
    parent, slash, _ = agent.rpartition("/")
    return parent + slash if slash else agent


def _acted_at(times: StepTimes | None) -> float:
    """Return the time of the action, or infinity without one.

    A TimeStep without an action earned no later reward, so it comes last in the order.
    """
    return math.inf if times is None or times.acted_at is None else times.acted_at
