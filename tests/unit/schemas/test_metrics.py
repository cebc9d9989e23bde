"""The table of metrics. That a job writes what the table has, and nothing else, is tested in `learner`."""

from __future__ import annotations

from palestra.schemas.metrics import METRIC_NAMES, METRICS


def test_every_metric_stands_once():
    assert len(METRICS) == len(METRIC_NAMES)
