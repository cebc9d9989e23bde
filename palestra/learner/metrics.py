"""All metrics that a run may write, from the places that declare them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from palestra.algorithms.loss import LOSSES, LossMetric
from palestra.algorithms.registry import ALGORITHMS
from palestra.schemas.metrics import METRICS, Metric
from palestra.trainer.base import TRAINER_METRICS, StepReport


def metric_tables() -> dict[str, tuple[Metric, ...]]:
    """Return the metrics by full name: a table for every run, and one for each algorithm and loss that Palestra ships.

    What a user's own loss measures is declared by its class.
    """
    found = {"Every run": (*METRICS, *_trained(TRAINER_METRICS))}
    found |= {f"Algorithm `{name}`": _trained(algorithm.metrics) for name, algorithm in ALGORITHMS.items()}
    shipped = sorted((name, loss) for name, loss in LOSSES.items() if loss.__module__.startswith("palestra."))
    return found | {f"Loss `{name}`": _trained(loss.metrics) for name, loss in shipped}


def loss_metrics(first: StepReport, last: StepReport, declared: Iterable[LossMetric]) -> dict[str, float]:
    """Return what a step writes of its gradients, by full name.

    Args:
        first: of the first epoch.
        last: of the last epoch.
        declared: the loss's metrics, which say for each name which epoch counts.
    """
    return {
        f"train/{metric.name}": (first if metric.epoch == "first" else last).metrics[metric.name]
        for metric in (*TRAINER_METRICS, *declared)
    }


def _trained(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    return tuple(replace(metric, name=f"train/{metric.name}") for metric in metrics)
