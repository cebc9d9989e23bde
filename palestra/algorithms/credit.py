"""Credit assignment: the return that each call of an episode is credited with, and its baseline."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from palestra.algorithms.base import StepOrder
from palestra.config import Credit
from palestra.types.calls import StepTimes
from palestra.types.records import SOLE_AGENT, EpisodeRecord, Trajectory


class BaselineKey(NamedTuple):
    """Identifies calls of one episode that share one return.

    The return counts once in the baseline, however many calls share it.

    Attributes:
        baseline_group: keys with equal values, over all episodes of a group, share a baseline.
        name: distinguishes the keys of one episode: the number of a TimeStep, the name of an agent, or both.
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


def episode_returns(trajectory: Trajectory, mode: Credit, discount: float, order: StepOrder = "observed") -> Returns:
    """Return the returns credited to the calls of a completed episode.

    Args:
        mode: `episode`: the sum of all rewards. `step`: the discounted sum of the rewards of the call's agent from the
            call's TimeStep on (Sutton and Barto 2018, equation 3.8), compared as by `branch`. `team-step`: the same sum
            of all agents' rewards, compared with all TimeSteps. `agent`: the reward of the call's agent, compared with
            those of the same agent. `branch`: as `agent`, but a subagent is compared with all that its parent started.
        discount: per TimeStep, for `step` and `team-step`.
        order: of the TimeSteps, for `step` and `team-step`: by their observations, or by their actions.
    """
    episode, chats = trajectory.episode, trajectory.chats
    if episode.reward is None:
        raise ValueError(f"episode {episode.episode_id} has no reward")
    if mode == "episode":
        sole = BaselineKey("", None)
        return Returns(values={sole: episode.reward}, key_of={chat.index: sole for chat in chats})
    if mode in ("step", "team-step"):
        return _returns_in_time(trajectory, mode == "team-step", discount, order)
    key_of = {
        chat.index: BaselineKey(_siblings(chat.agent) if mode == "branch" else chat.agent, chat.agent) for chat in chats
    }
    return Returns(
        values={key: agent_reward(str(key.name), episode) for key in sorted(set(key_of.values()), key=str)},
        key_of=key_of,
    )


def paid_as(agent: str, episode: EpisodeRecord) -> Collection[str]:
    """Return the agents whose rewards are credited to an agent's calls: itself, or its nearest parent with a reward.

    If neither has one, it earned nothing where others are paid by name. A single reward for the whole episode is each
    agent's reward. A subagent's name begins with its parent's: `planner/search`.
    """
    rewards, name = episode.rewards or {}, agent
    while name:
        if name in rewards:
            return (name,)
        name = name.rpartition("/")[0]
    names_no_agent = rewards.keys() == {SOLE_AGENT} and episode.agent_step_rewards is None
    return rewards if names_no_agent else ()


def agent_reward(agent: str, episode: EpisodeRecord) -> float:
    """Return an agent's reward in a completed episode; see `paid_as`."""
    return float(sum((episode.rewards or {})[name] for name in paid_as(agent, episode)))


def step_returns(
    trajectory: Trajectory, discount: float, order: StepOrder = "observed", agent: str | None = None
) -> list[float]:
    """Return G_t = r_t + discount x G_(t+1) for each TimeStep, with t counting TimeSteps in the given order. Without
    `agent` all agents' rewards count.
    """
    places = step_places(trajectory, order)
    rewards = rewards_in_time(trajectory, places, agent, order)
    returns = [0.0] * len(rewards)
    following = 0.0
    for place in reversed(range(len(rewards))):
        following = returns[place] = rewards[place] + discount * following
    return [returns[place] for place in places]


def step_places(trajectory: Trajectory, order: StepOrder = "observed") -> list[int]:
    """Return each TimeStep's position in the order of time.

    If several agents act at the same time, an action cannot have earned a reward that came before it; so with `acted`,
    TimeSteps are ordered by the times of their actions. Without recorded times both orders are that of the TimeSteps.
    """
    episode = trajectory.episode
    if episode.step_rewards is None:
        count = max((chat.time_step for chat in trajectory.chats), default=0) + 1
    else:
        count = len(episode.step_rewards)
    steps, times = list(range(count)), episode.step_times
    if order == "acted" and times is not None:
        steps.sort(key=lambda step: _acted_at(times[step] if step < len(times) else None))
    places = [0] * count
    for place, step in enumerate(steps):
        places[step] = place
    return places


def rewards_in_time(
    trajectory: Trajectory, places: Sequence[int], agent: str | None = None, order: StepOrder = "observed"
) -> list[float]:
    """Return the rewards of each TimeStep, in the order of time.

    If TimeSteps have no rewards, or it is unknown whose they are, all rewards count as earned in the last. `places` are
    those of `step_places`; without `agent` all agents' rewards count, of agents that act at the same time in the last
    of their TimeSteps: each may have earned the others' rewards.
    """
    episode = trajectory.episode
    rewards, steps, by_agent = episode.rewards or {}, episode.step_rewards, episode.agent_step_rewards
    names = rewards.keys() if agent is None else paid_as(agent, episode)
    found = [0.0] * len(places)
    if steps is not None and (agent is None or set(names) == rewards.keys()):
        last = _last_at_once(episode) if agent is None and order == "observed" else range(len(steps))
        for step, reward in enumerate(steps):
            found[places[last[step]]] += reward
    elif steps is not None and by_agent is not None:
        for earned in by_agent:
            found[places[earned.time_step]] += earned.reward if earned.agent in names else 0.0
    elif found:
        found[places[-1]] = float(sum(rewards[name] for name in names))
    return found


def _returns_in_time(trajectory: Trajectory, pooled: bool, discount: float, order: StepOrder) -> Returns:
    """Return the returns of an episode by TimeStep: of each agent by itself, or pooled over all agents."""
    agents = {chat.agent for chat in trajectory.chats}
    returns = {
        agent: step_returns(trajectory, discount, order, agent) for agent in ((None,) if pooled else sorted(agents))
    }

    def key_of(agent: str, step: int) -> BaselineKey:
        return BaselineKey("", step) if pooled else BaselineKey(_siblings(agent), (agent, step))

    called = sorted({(chat.time_step, chat.agent) for chat in trajectory.chats})
    return Returns(
        values={key_of(agent, step): returns[None if pooled else agent][step] for step, agent in called},
        key_of={chat.index: key_of(chat.agent, chat.time_step) for chat in trajectory.chats},
    )


def _siblings(agent: str) -> str:
    """Return `planner/` for `planner/search`, and the name itself for an agent without a parent."""
    parent, slash, _ = agent.rpartition("/")
    return parent + slash if slash else agent


def _last_at_once(episode: EpisodeRecord) -> Sequence[int]:
    """Return for each TimeStep the last one that was observed before its action, or itself: agents acted at once."""
    steps = range(len(episode.step_rewards or ()))
    if (times := episode.step_times) is None or len(times) != len(steps):
        return steps
    observed = [one.observed_at for one in times]
    return [
        step if (acted := times[step].acted_at) is None else max(step, bisect_left(observed, acted) - 1)
        for step in steps
    ]


def _acted_at(times: StepTimes | None) -> float:
    """Return the time of the action, or infinity without one: such a TimeStep earned no later reward."""
    return math.inf if times is None or times.acted_at is None else times.acted_at
