"""What of an episode is to be learned from by one policy: its own calls, and the rewards of agents that learn."""

from __future__ import annotations

from dataclasses import replace

from palestra.config import Roles
from palestra.types.records import Trajectory


def share_of(trajectory: Trajectory, policy: str, roles: Roles) -> Trajectory:
    """Return an episode as one policy has played it.

    Calls of other policies are left out, and rewards of agents that a frozen policy plays. So an algorithm compares a
    policy with itself: what another policy said or earned is part of the world to it.

    Args:
        trajectory: a completed episode.
        policy: by name.
        roles: of the job's agents.

    Returns:
        The episode itself where nothing is left out, as in any job with one policy.
    """
    # One of the rewards of a zero-sum game takes back what the other gives: their sum says nothing of who played well.
    episode = trajectory.episode
    rewards = None if episode.rewards is None else roles.trained_rewards(episode.rewards)
    if rewards == episode.rewards and all(chat.policy == policy for step in trajectory.steps for chat in step.chats):
        return trajectory
    own = [(step, tuple(chat for chat in step.chats if chat.policy == policy)) for step in trajectory.steps]
    return Trajectory(
        episode=replace(episode, rewards=None if rewards is None else dict(rewards)),
        steps=tuple(replace(step, chats=chats) for step, chats in own if chats),
    )
