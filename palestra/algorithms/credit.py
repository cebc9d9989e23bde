"""Credit: which return each call of an episode answers for, and with which others it is compared."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from palestra.algorithms.base import StepOrder
from palestra.schemas.records import StepTimes, Trajectory

CreditMode = Literal["episode", "step", "agent", "branch"]


class BaselineKey(NamedTuple):
    """What calls of one episode that are credited together have in common: more of them do not count more.

    Attributes:
        baseline_group: keys of a group of episodes with the same one share a baseline.
        name: tells the keys of one episode apart: a TimeStep's number, or an agent's name.
    """

    baseline_group: str
    name: Hashable


@dataclass(frozen=True, kw_only=True, slots=True)
class Returns:
    """The returns of one episode.

    Attributes:
        values: a reward, or a discounted sum of rewards, by key.
        key_of: the key of each call, by the call's index.
    """

    values: dict[BaselineKey, float]
    key_of: dict[int, BaselineKey]


def episode_returns(
    trajectory: Trajectory, mode: CreditMode, discount: float, order: StepOrder = "observed"
) -> Returns:
    """Return what the calls of a completed episode are credited with.

    Args:
        trajectory: a completed episode.
        mode: `episode`: the sum of all rewards; `step`: the discounted sum of the TimeSteps' rewards from the call's
            own on (Sutton and Barto 2018, equation 3.8), or the episode's reward, as the last TimeStep's, where they
            have none; `agent`: the reward of the call's agent, compared with those of the same agent; `branch`: as
            `agent`, but a subagent is compared with all that its parent started.
        discount: of one TimeStep, for `step`.
        order: of the TimeSteps, for `step`: by their observations, or by their actions.

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
    """Return the agent's reward, or its nearest parent's (`planner` of `planner/search`), or else the sum of all.

    Args:
        agent: its name; a subagent's begins with its parent's and a slash.
        rewards: by agent.
    """
    name = agent
    while name:
        if name in rewards:
            return rewards[name]
        name = name.rpartition("/")[0]
    return float(sum(rewards.values()))


def step_returns(trajectory: Trajectory, total: float, discount: float, order: StepOrder = "observed") -> list[float]:
    """Return G_t = r_t + discount x G_(t+1) by TimeStep; t counts them in the given order.

    Where several agents act at the same time, an action that was given later can't have earned what came before it:
    `acted` says that the order of the actions counts. Without recorded times both are the TimeSteps' own order.

    Args:
        trajectory: a completed episode.
        total: the episode's reward, which is the last TimeStep's where TimeSteps have none.
        discount: of one TimeStep.
        order: of the TimeSteps.
    """
    last = max((chat.time_step for chat in trajectory.chats), default=-1)
    rewards = trajectory.episode.step_rewards
    if rewards is None:
        rewards = (*[0.0] * last, total)
    places = list(range(len(rewards)))
    times = trajectory.episode.step_times
    if order == "acted" and times is not None:
        places.sort(key=lambda place: _acted_at(times[place] if place < len(times) else None))
    returns = [0.0] * len(rewards)
    following = 0.0
    for place in reversed(places):
        following = returns[place] = rewards[place] + discount * following
    return returns


def _siblings(agent: str) -> str:
    """Return `planner/` for `planner/search`; an agent without a parent is compared with itself."""
    parent, slash, _ = agent.rpartition("/")
    return parent + slash if slash else agent


def _acted_at(times: StepTimes | None) -> float:
    """Return when the action was given; a TimeStep without one earned nothing that came later, so it is last."""
    return math.inf if times is None or times.acted_at is None else times.acted_at
