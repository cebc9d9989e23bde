"""The tables of metrics; that a job writes what stands in them, and nothing else, is tested in test_learner."""

from __future__ import annotations

from collections import Counter

from palestra.algorithms.loss import LossMetric
from palestra.learner.metrics import loss_metrics, metric_tables
from palestra.trainer.base import TRAINER_METRICS, StepReport

METRICS = [metric for metrics in metric_tables().values() for metric in metrics]


def test_every_metric_stands_once():
    assert max(Counter(metric.name for metric in METRICS).values()) == 1


def test_a_metric_is_written_of_the_epoch_that_its_loss_declares():
    declared = (LossMetric("a", "1", "A."), LossMetric("b", "1", "B.", epoch="first"))
    names = [metric.name for metric in (*TRAINER_METRICS, *declared)]

    def report(value: float) -> StepReport:
        return StepReport(
            rows=1, trained_tokens=1, forward_tokens=1, flat_tokens=1, metrics=dict.fromkeys(names, value)
        )

    assert loss_metrics(report(1.0), report(2.0), declared) == {
        "train/loss": 2.0,
        "train/entropy": 2.0,
        "train/logprob_gap_mean": 1.0,
        "train/logprob_gap_max": 1.0,
        "train/sampling_kl": 2.0,
        "train/a": 2.0,
        "train/b": 1.0,
    }
