"""The part of an episode that one policy learns from: its own calls, and the rewards of learning agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from palestra.algorithms.named_rewards import missing_rewards
from palestra.config import AlgorithmConfig, Roles
from palestra.types.calls import Chat
from palestra.types.records import EpisodeRecord, Trajectory


def share_of(trajectory: Trajectory, policy: str, roles: Roles) -> Trajectory:
    """Return an episode as one policy has played it; the episode itself if that is all of it.

    Calls of other policies are left out, and rewards of their agents. So an algorithm compares a policy with itself:
    other policies are part of the world.

    If several policies are trained, named rewards are left out as well, because they belong to the whole episode:
    agents' rewards are their weighted sums.
    """
    # One of the rewards of a zero-sum game takes back what the other gives: their sum says nothing of who played well.
    episode = trajectory.episode
    paid = episode.rewards_by_policies  # others' rewards are of no call
    rewards = None if paid is None else roles.of_episode(episode.players).rewards_of(policy, paid)
    sole = rewards == episode.rewards and all(c.policy == policy for step in trajectory.steps for c in step.chats)
    if sole and not (roles.rivals and episode.named_rewards):
        return trajectory
    own = [(step, tuple(chat for chat in step.chats if chat.policy == policy)) for step in trajectory.steps]
    steps = tuple(replace(step, chats=chats) for step, chats in own if chats)
    earned = None if rewards is None else _step_rewards(episode, rewards, roles)
    named = None if roles.rivals else episode.named_rewards
    episode = replace(
        episode, rewards=None if rewards is None else dict(rewards), step_rewards=earned, named_rewards=named
    )
    steps = tuple(replace(step, reward=_at(earned, step.index)) for step in steps)
    return Trajectory(episode=episode, steps=steps)


def shares_of(trajectories: Sequence[Trajectory], policy: str, roles: Roles) -> list[Trajectory]:
    """Return what one policy learns from in each episode, in order.

    If several policies are trained, or past versions play, episodes without this policy are left out.
    """
    shares = [share_of(trajectory, policy, roles) for trajectory in trajectories]
    return [
        share for share in shares if not (roles.rivals or share.episode.players) or share.episode.rewards or share.steps
    ]


def _step_rewards(episode: EpisodeRecord, own: Mapping[str, float], roles: Roles) -> tuple[float, ...] | None:
    """Return some agents' rewards by TimeStep; None: unknown, so all count as earned in the last."""
    if episode.step_rewards is None or own == episode.rewards:
        return episode.step_rewards
    if episode.agent_step_rewards is None:  # without rivals, what frozen policies earn is in no TimeStep's reward
        return None if roles.rivals else episode.step_rewards
    found = [0.0] * len(episode.step_rewards)
    for step, agent, reward in episode.agent_step_rewards:
        if agent in own:
            found[step] += reward
    return tuple(found)


def _at(rewards: tuple[float, ...] | None, step: int) -> float | None:
    """Return the reward of a TimeStep; None: it has none of its own."""
    return None if rewards is None or step >= len(rewards) else rewards[step]


def rewards_of(episodes: Sequence[EpisodeRecord], roles: Roles, algorithm: AlgorithmConfig) -> list[float]:
    """Return the reward of each completed episode in which policies played. Rewards of agents played by frozen policies
    are not counted; `algorithm` weights named rewards.
    """
    scored = played_by_policies(episodes)
    rewards = [float(sum(roles.of_episode(e.players).trained_rewards(own).values())) for e, own in scored]
    missing = missing_rewards([e.named_rewards for e, _ in scored], algorithm)
    return [reward + more for reward, more in zip(rewards, missing, strict=True)]


def played_by_policies(episodes: Sequence[EpisodeRecord]) -> list[tuple[EpisodeRecord, dict[str, float]]]:
    """Return the episodes in which policies played, each with the rewards of their agents."""
    return [(e, own) for e in episodes if (own := e.rewards_by_policies) is not None and (own or not e.rewards)]


def unused_calls(trajectory: Trajectory, roles: Roles) -> frozenset[int]:
    """Return the indices of calls that are not trained, whatever their policy and their reward.

    They are calls of external players that left before they acted, so that another worker, or the policy, answered the
    observation; and calls of agents that the job does not train.
    """
    untrained = [] if not roles.untrained else [c.index for c in trajectory.chats if not roles.trains(c.agent)]
    return trajectory.episode.unused_calls.union(untrained)


def without_unused(share: Trajectory, roles: Roles) -> tuple[Trajectory, list[Chat]]:
    """Return an episode without its unused calls, and these calls."""
    unused = unused_calls(share, roles)
    left_out = [chat for chat in share.chats if chat.index in unused]
    if not left_out:
        return share, left_out
    used = [(step, tuple(chat for chat in step.chats if chat.index not in unused)) for step in share.steps]
    return replace(share, steps=tuple(replace(step, chats=chats) for step, chats in used if chats)), left_out
