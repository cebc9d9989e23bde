"""All metrics that a run may write, collected from the modules that declare them, for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from palestra.algorithms.loss import LOSSES, LossMetric
from palestra.algorithms.registry import ALGORITHMS
from palestra.algorithms.regularization import REGULARIZATION_METRICS
from palestra.learner.environment_metrics import ENVIRONMENT_METRICS
from palestra.learner.reporting import ROLE_METRICS
from palestra.trainer.base import CRITIC_METRICS, REFERENCE_METRICS, TRAINER_METRICS, StepReport
from palestra.types.metrics import METRICS, Metric

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
