"""All metrics that a run may write, and those of single environments and of a step's gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from palestra.algorithms.base import Group
from palestra.algorithms.loss import LOSSES, LossMetric
from palestra.algorithms.registry import ALGORITHMS
from palestra.algorithms.regularization import REGULARIZATION_METRICS
from palestra.config import AlgorithmConfig, Roles
from palestra.config.budget import HOUR_MS, UNITS
from palestra.learner.reporting import ROLE_METRICS
from palestra.learner.shares import rewards_of
from palestra.store.ledger import BudgetAmounts
from palestra.trainer.base import CRITIC_METRICS, REFERENCE_METRICS, TRAINER_METRICS, StepReport
from palestra.types.metrics import METRICS, Metric
from palestra.types.records import EpisodeRecord, Trajectory

CRITIC_UPDATE_METRICS = (
    Metric("critic_grad_norm", "norm", "L2 norm of the critic's gradient, before clipping; last epoch."),
    Metric("critic_learning_rate", "rate", "Learning rate of the critic's update."),
    Metric("critic_updates_skipped", "updates", "Updates of the critic left out because a gradient was not finite."),
)


def metric_tables() -> dict[str, tuple[Metric, ...]]:
    """Return the metrics by table title: of every run, and of the algorithms and losses that Palestra ships.

    A metric shared by several algorithms or losses occurs once, with their names. Metrics of a user's own loss are
    declared by its class.
    """
    shipped = {name: loss for name, loss in sorted(LOSSES.items()) if loss.__module__.startswith("palestra.")}
    return {
        "Every run": (*METRICS, *_trained(TRAINER_METRICS)),
        "Where several agents are rewarded": ROLE_METRICS,
        "With several environments": ENVIRONMENT_METRICS,
        "With prices or a budget": SPENT_METRICS,
        "With a reference policy": _trained((*REFERENCE_METRICS, *REGULARIZATION_METRICS)),
        "With a critic": _trained((*CRITIC_METRICS, *CRITIC_UPDATE_METRICS)),
        "Algorithms": _trained(_named({name: algorithm.metrics for name, algorithm in ALGORITHMS.items()})),
        "Losses": _trained(_named({name: loss.metrics for name, loss in shipped.items()})),
    }


def loss_metrics(first: StepReport, last: StepReport, declared: Iterable[LossMetric]) -> dict[str, float]:
    """Return the metrics of a step's gradients of one network, by full name. Each declared metric says which update
    counts.
    """
    return {
        f"train/{metric.name}": (first if metric.epoch == "first" else last).metrics[metric.name]
        for metric in (*TRAINER_METRICS, *REFERENCE_METRICS, *CRITIC_METRICS, *declared)
        if metric.name in last.metrics
    }


def _trained(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    return tuple(replace(metric, name=f"train/{metric.name}") for metric in metrics)


def _named(by_owner: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """Return each metric once; its formula begins with the names of its owners."""
    owners: dict[tuple[str, str, str], list[str]] = {}
    for owner, metrics in by_owner.items():
        for metric in metrics:
            owners.setdefault((metric.name, metric.unit, metric.formula), []).append(f"`{owner}`")
    return [Metric(name, unit, f"{', '.join(names)}: {formula}") for (name, unit, formula), names in owners.items()]


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


SPENT_METRICS = (
    Metric("cost/tokens", "tokens", "Tokens of prompts and replies of all calls so far, of policies and of servers."),
    Metric("cost/hours", "h", "Hours for which the job has run so far, over all its restarts."),
    Metric("cost/money", "currency", "What calls and devices have cost so far, by `[prices]`."),
)


def spent_metrics(total: BudgetAmounts) -> dict[str, float]:
    """Return the metrics of what a job has spent."""
    return {
        "cost/tokens": float(total.tokens),
        "cost/hours": total.ms / HOUR_MS,
        "cost/money": total.money / UNITS,
    }


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
