"""Credit: which reward each call of an episode answers for, and with which others it is compared."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from palestra.algorithms.grpo import unit_advantages
from palestra.schemas.records import StepTimes, Trajectory

CreditMode = Literal["episode", "step", "agent", "branch"]
StepOrder = Literal["observed", "acted"]


class Unit(NamedTuple):
    """Calls of one episode that are credited together: more of them do not count more."""

    peers: str  # units of the group with the same are compared with one another
    name: Hashable


@dataclass(frozen=True, kw_only=True, slots=True)
class Credits:
    """Of one episode."""

    values: dict[Unit, float]  # a reward, or a discounted sum of rewards
    unit_of: dict[int, Unit]  # by index of the call


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCredit:
    """The advantages of a group."""

    advantages: list[dict[int, float]]  # for each episode, by index of the call
    calls_without_peers: int  # there was no other episode to compare them with: advantage 0


def episode_credits(
    trajectory: Trajectory, mode: CreditMode, discount: float, order: StepOrder = "observed"
) -> Credits:
    """What the calls of a completed episode are credited with.

    Args:
        trajectory: a completed episode.
        mode: `episode`: the sum of all rewards; `step`: the discounted sum of the TimeSteps' rewards from the call's
            own on (Sutton and Barto 2018, equation 3.8), or the episode's reward, as the last TimeStep's, where they
            have none; `agent`: the reward of the call's agent, compared with those of the same agent; `branch`:
            likewise, and a subagent is compared with all that its parent started.
        discount: of one TimeStep, for `step`.
        order: of the TimeSteps, for `step`: by their observations, or by their actions.
    """
    rewards, chats = trajectory.episode.rewards, trajectory.chats
    if rewards is None:
        raise ValueError(f"episode {trajectory.episode.episode_id} has no reward")
    total = float(sum(rewards.values()))
    if mode == "episode":
        sole = Unit("", None)
        return Credits(values={sole: total}, unit_of={chat.index: sole for chat in chats})
    if mode == "step":
        returns = step_returns(trajectory, total, discount, order)
        return Credits(
            values={Unit("", step): returns[step] for step in sorted({chat.time_step for chat in chats})},
            unit_of={chat.index: Unit("", chat.time_step) for chat in chats},
        )
    unit_of = {
        chat.index: Unit(_siblings(chat.agent) if mode == "branch" else chat.agent, chat.agent) for chat in chats
    }
    return Credits(
        values={unit: agent_reward(str(unit.name), rewards) for unit in sorted(set(unit_of.values()), key=str)},
        unit_of=unit_of,
    )


def group_credit(credits_G: Sequence[Credits], scale: Literal["std", "none"]) -> GroupCredit:
    """Each value compared with its peers, in the other episodes of the group and its own."""
    advantages: list[dict[Unit, float]] = [{} for _ in credits_G]
    alone: set[str] = set()
    for peers in sorted({unit.peers for credits in credits_G for unit in credits.values}):
        units = [[unit for unit in credits.values if unit.peers == peers] for credits in credits_G]
        values = [[credits.values[unit] for unit in mine] for credits, mine in zip(credits_G, units, strict=True)]
        if sum(map(bool, units)) < 2:
            alone.add(peers)
        for place, found in enumerate(unit_advantages(values, scale)):
            advantages[place] |= zip(units[place], found, strict=True)
    by_call = [
        {index: of_unit[unit] for index, unit in credits.unit_of.items()}
        for credits, of_unit in zip(credits_G, advantages, strict=True)
    ]
    without = sum(unit.peers in alone for credits in credits_G for unit in credits.unit_of.values())
    return GroupCredit(advantages=by_call, calls_without_peers=without)


def agent_reward(agent: str, rewards: Mapping[str, float]) -> float:
    """Its own, or else its parent's (`planner` of `planner/search`), and so on; the sum of all where none has one."""
    name = agent
    while name:
        if name in rewards:
            return rewards[name]
        name = name.rpartition("/")[0]
    return float(sum(rewards.values()))


def step_returns(trajectory: Trajectory, total: float, discount: float, order: StepOrder = "observed") -> list[float]:
    """G_t = r_t + discount x G_(t+1), by TimeStep; t counts them in the given order.

    Where several agents act at once, an action that was given later can't have earned what came before it: `acted`
    says that the order of the actions counts. Without recorded times both are the TimeSteps' own order.
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
    """`planner/` for `planner/search`; an agent that nobody started is compared with itself."""
    parent, slash, _ = agent.rpartition("/")
    return parent + slash if slash else agent


def _acted_at(times: StepTimes | None) -> float:
    """Where no action was given, nothing was earned later."""
    return math.inf if times is None or times.acted_at is None else times.acted_at
