"""Named rewards of an episode: substitutes for missing ones, and normalisation of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from palestra.algorithms.base import Group
from palestra.algorithms.baselines import centred_returns
from palestra.config import AlgorithmConfig
from palestra.types.calls import AgentStepReward
from palestra.types.records import TrainSample, Trajectory

_SAME = 1e-9  # sums of normalised rewards that differ by less, as a share of what was added up, are equal
NamedRewards = Mapping[str, float | None]


def filled_rewards(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> list[float]:
    """Return the reward of each episode of a group, with the mean of the scored ones for a missing reward.

    So a missing reward makes an episode neither better nor worse than its group, as a 0 would. Episodes without named
    rewards keep their reward.
    """
    named = [trajectory for trajectory in trajectories if trajectory.episode.named_rewards is not None]
    names = _names(named)
    means = {name: _mean([value for value in _column(named, name) if value is not None]) for name in names}
    return [
        _total(trajectory)
        if (given := trajectory.episode.named_rewards) is None
        else config.weighted_sum({name: _or(given.get(name), means[name]) for name in names})
        for trajectory in trajectories
    ]


def normalised_rewards(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> list[float]:
    """Return for each episode of a group the weighted sum of its rewards, each normalised in the group before.

    Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization", equation 4. A missing reward adds
    0, the mean of the others. A single reward has the name "".
    """
    found, sizes = [0.0] * len(trajectories), [0.0] * len(trajectories)
    for name in _names(trajectories):
        values = [[] if value is None else [value] for value in _column(trajectories, name)]
        for place, advantages in enumerate(centred_returns(values, "std")):
            added = config.weighted_sum({name: advantages[0] if advantages else None})
            found[place] += added
            sizes[place] += abs(added)
    # Rewards that cancel out, such as a share and the rest up to 1, leave rounding, which is nothing to learn from.
    return found if max(found) - min(found) > _SAME * max(sizes) else [0.0] * len(found)


def missing_rewards(named: Sequence[NamedRewards | None], config: AlgorithmConfig) -> list[float]:
    """Return for each episode what its missing rewards add to its reward: the means of the scored ones. None is a
    single reward, which is complete.
    """
    means = reward_means(named)
    return [
        0.0
        if given is None
        else config.weighted_sum({name: mean for name, mean in means.items() if given.get(name) is None})
        for given in named
    ]


def with_missing_rewards(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> Sequence[Trajectory]:
    """Return the episodes of a group with missing rewards replaced by the mean of the others.

    The addition is earned in the last TimeStep, like the reward of an episode whose TimeSteps have none.
    """
    added = missing_rewards([trajectory.episode.named_rewards for trajectory in trajectories], config)
    return [_with_more(t, more, config) if more else t for t, more in zip(trajectories, added, strict=True)]


def with_batch_means(groups: Sequence[Group], config: AlgorithmConfig) -> list[Group]:
    """Return groups in which a reward that a whole group lacks is replaced by the batch's mean.

    Otherwise it would count as 0 where returns of several groups are compared or a critic learns them.
    """
    means = reward_means([t.episode.named_rewards for group in groups for t in group.trajectories])
    found = []
    for group in groups:
        named = [t.episode.named_rewards for t in group.trajectories]
        asked, scored = {name for given in named for name in given or ()}, reward_means(named)
        added = {name: mean for name, mean in means.items() if name in asked and name not in scored}
        episodes = tuple(_with_means(t, added, config) for t in group.trajectories) if added else group.trajectories
        found.append(replace(group, trajectories=episodes))
    return found


def scored_episodes(
    groups: Sequence[Group], config: AlgorithmConfig
) -> Iterator[tuple[Trajectory, dict[int, TrainSample]]]:
    """Yield each episode, with missing rewards replaced, and its rows, numbered over all groups. Groups are all of the
    batch, in canonical order.
    """
    start = 0
    for group in with_batch_means(groups, config):
        rows: defaultdict[str, dict[int, TrainSample]] = defaultdict(dict)
        for number, row in enumerate(group.rows, start):
            rows[row.episode_id][number] = row
        start += len(group.rows)
        for trajectory in with_missing_rewards(group.trajectories, config):
            yield trajectory, rows[trajectory.episode.episode_id]


def _with_means(trajectory: Trajectory, means: Mapping[str, float], config: AlgorithmConfig) -> Trajectory:
    """Return an episode with these means for its missing rewards; a single reward is complete."""
    given = trajectory.episode.named_rewards
    if given is None:
        return trajectory
    found = _with_more(trajectory, config.weighted_sum(means), config)
    return replace(found, episode=replace(found.episode, named_rewards={**given, **means}))


def _with_more(trajectory: Trajectory, more: float, config: AlgorithmConfig) -> Trajectory:
    """Return an episode with more reward, of its last TimeStep and of the agent that has a reward."""
    episode = trajectory.episode
    rewards, steps, by_agent = dict(episode.rewards or {}), episode.step_rewards, episode.agent_step_rewards
    if not rewards or (len(rewards) > 1 and config.credits_agents):
        return trajectory  # it is not known whose reward that would have been
    agent = min(rewards)  # of several agents the sum alone counts
    rewards[agent] += more
    if steps:
        steps = (*steps[:-1], steps[-1] + more)
    if steps and by_agent is not None:
        by_agent = (*by_agent, AgentStepReward(len(steps) - 1, agent, more))
    episode = replace(episode, rewards=rewards, step_rewards=steps, agent_step_rewards=by_agent)
    return replace(trajectory, episode=episode)


def reward_means(named: Sequence[NamedRewards | None]) -> Mapping[str, float]:
    """Return the mean of each named reward over the episodes that have it, by name."""
    found = {}
    for name in sorted({name for given in named for name in given or ()}):
        if scored := [value for given in named if given is not None and (value := given.get(name)) is not None]:
            found[name] = _mean(scored)
    return found


def _names(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return the names of rewards of any of the episodes, in alphabetical order."""
    return sorted({name for trajectory in trajectories for name in _named(trajectory)})


def _named(trajectory: Trajectory) -> Mapping[str, float | None]:
    """Return the named rewards of an episode; one without names has a reward without a name."""
    given = trajectory.episode.named_rewards
    return {"": _total(trajectory)} if given is None else given


def _column(trajectories: Sequence[Trajectory], name: str) -> list[float | None]:
    """Return one reward of each episode; None where it is missing."""
    return [_named(trajectory).get(name) for trajectory in trajectories]


def _total(trajectory: Trajectory) -> float:
    reward = trajectory.episode.reward
    assert reward is not None
    return reward


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
