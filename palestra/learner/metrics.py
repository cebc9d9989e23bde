"""All metrics that a run may write, collected from the modules that declare them, for the documentation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from palestra.algorithms.loss import LOSSES, LossMetric
from palestra.algorithms.registry import ALGORITHMS
from palestra.trainer.base import TRAINER_METRICS, StepReport
from palestra.types.metrics import METRICS, Metric


def metric_tables() -> dict[str, tuple[Metric, ...]]:
    """Return the metrics by title of a table: one for every run, and one for each loss that Palestra ships.

    Algorithms with the same metrics share a table.

    Metrics of a user's own loss are declared by its class.
    """
    found = {"Every run": (*METRICS, *_trained(TRAINER_METRICS))}
    by_metrics: dict[tuple[Metric, ...], list[str]] = {}
    for name, algorithm in ALGORITHMS.items():
        by_metrics.setdefault(algorithm.metrics, []).append(f"`{name}`")
    found |= {f"Algorithm {', '.join(names)}": _trained(metrics) for metrics, names in by_metrics.items() if metrics}
    shipped = sorted((name, loss) for name, loss in LOSSES.items() if loss.__module__.startswith("palestra."))
    return found | {f"Loss `{name}`": _trained(loss.metrics) for name, loss in shipped}


def loss_metrics(first: StepReport, last: StepReport, declared: Iterable[LossMetric]) -> dict[str, float]:
    """Return the metrics of a step's gradients, by full name.

    Args:
        first: report of the first epoch.
        last: report of the last epoch.
        declared: metrics of the loss; each says which epoch counts.
    """
    return {
        f"train/{metric.name}": (first if metric.epoch == "first" else last).metrics[metric.name]
        for metric in (*TRAINER_METRICS, *declared)
    }


def _trained(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    return tuple(replace(metric, name=f"train/{metric.name}") for metric in metrics)
