"""Metrics of agents that play against each other: mean rewards by role, and wins by version."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from palestra.config import Roles
from palestra.store.casting import results
from palestra.types.metrics import Metric
from palestra.types.records import Trajectory

ROLE_METRICS = (
    Metric(
        "rollout/reward/AGENT",
        "reward",
        "Mean reward of the agent AGENT over the batch's episodes in which several agents are rewarded, with any "
        "policy; of each such agent without a parent, at most 16.",
    ),
    Metric(
        "rollout/pool/VERSION/win_rate",
        "ratio",
        "Mean over the batch's episodes in which the past version VERSION (`white@5`) plays: 1 where the agents that "
        "learn have a higher mean reward than those of the version, 0.5 where both have the same, 0 otherwise.",
    ),
    Metric("rollout/pool/VERSION/episodes", "episodes", "The batch's episodes in which VERSION plays and is rewarded."),
)
MOST_AGENTS = 16  # agents of which a row has the mean reward; their names come from environments and workers


def role_metrics(trajectories: Sequence[Trajectory], roles: Roles) -> dict[str, float]:
    """Return the mean reward of each agent, and how often each past version was beaten, by full name.

    Subagents are left out, and episodes in which only one agent is rewarded.
    """
    by_agent: defaultdict[str, list[float]] = defaultdict(list)
    points: defaultdict[str, list[float]] = defaultdict(list)
    for episode in (trajectory.episode for trajectory in trajectories):
        rewards: Mapping[str, float] = episode.rewards or {}
        named = {agent: reward for agent, reward in rewards.items() if "/" not in agent}
        if len(named) > 1:
            for agent, reward in named.items():
                by_agent[agent].append(reward)
        for version, won in results(roles, episode.players, rewards).items():
            points[version].append(won)
    found = {f"rollout/reward/{agent}": _mean(by_agent[agent]) for agent in sorted(by_agent)[:MOST_AGENTS]}
    for version, won_by in sorted(points.items()):
        found[f"rollout/pool/{version}/win_rate"] = _mean(won_by)
        found[f"rollout/pool/{version}/episodes"] = float(len(won_by))
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
