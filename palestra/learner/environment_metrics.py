"""The environments of a job with several: their groups, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from palestra.algorithms.base import Group
from palestra.config import AlgorithmConfig, Roles
from palestra.learner.shares import rewards_of
from palestra.types.metrics import Metric
from palestra.types.records import EpisodeRecord, Trajectory

ENVIRONMENT_METRICS = (
    Metric("train/environments/NAME/groups", "groups", "Groups of the batch that play the environment NAME."),
    Metric("train/environments/NAME/tokens", "tokens", "Sampled tokens of all calls of these groups."),
    Metric("train/environments/NAME/reward_mean", "reward", "`train/reward_mean` over their episodes."),
    Metric(
        "train/environments/NAME/informative_share",
        "ratio",
        "Share of these groups whose episodes have different rewards, before any shaping.",
    ),
    Metric("validation/environments/NAME/reward_mean", "reward", "`validation/reward_mean` over the tasks of NAME."),
)


def environment_of(episode: EpisodeRecord) -> str:
    """Return the environment of an episode of a job with several."""
    return episode.task.task_id.partition("/")[0]


def with_environments(groups: Sequence[Group]) -> list[Group]:
    """Return groups with the names of their environments."""
    return [replace(group, environment=environment_of(group.trajectories[0].episode)) for group in groups]


def environment_metrics(
    trajectories: Sequence[Trajectory], roles: Roles, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Return the metrics of a batch by environment, by full name. Rewards of agents played by frozen policies are not
    counted; `algorithm` weights named rewards.
    """
    groups: dict[str, list[list[Trajectory]]] = {}
    for _, members in groupby(trajectories, key=lambda one: one.episode.group_index):
        of_group = list(members)
        groups.setdefault(environment_of(of_group[0].episode), []).append(of_group)
    row: dict[str, float] = {}
    for name, found in sorted(groups.items()):
        rewards = [rewards_of([one.episode for one in of_group], roles, algorithm) for of_group in found]
        scored = [reward for of_group in rewards for reward in of_group]
        sampled = [len(call.completion_ids) for of_group in found for one in of_group for call in one.chats]
        key = f"train/environments/{name}"
        row |= {f"{key}/groups": float(len(found)), f"{key}/tokens": float(sum(sampled))}
        row[f"{key}/informative_share"] = sum(len(set(each)) > 1 for each in rewards) / len(found)
        row |= {f"{key}/reward_mean": sum(scored) / len(scored)} if scored else {}
    return row


def validation_metrics(
    episodes: Sequence[EpisodeRecord], roles: Roles, algorithm: AlgorithmConfig
) -> Mapping[str, float]:
    """Return the mean reward of scored validation episodes by environment; arguments as in `environment_metrics`."""
    found: dict[str, list[EpisodeRecord]] = {}
    for episode in episodes:
        found.setdefault(environment_of(episode), []).append(episode)
    rewards = {name: rewards_of(own, roles, algorithm) for name, own in sorted(found.items())}
    return {f"validation/environments/{name}/reward_mean": sum(own) / len(own) for name, own in rewards.items() if own}
