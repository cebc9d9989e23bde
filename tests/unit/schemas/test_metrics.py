"""The table of metrics against what a job really writes (the loop itself is tested in `learner`)."""

from __future__ import annotations

import re

from palestra.schemas.metrics import METRIC_NAMES, METRICS


def test_every_metric_stands_once_with_a_unit_and_a_formula():
    assert len(METRICS) == len(METRIC_NAMES)
    assert all(metric.unit and metric.formula.endswith(".") for metric in METRICS)


def test_names_say_where_they_come_from():
    for name in METRIC_NAMES - {"step", "version", "wall_seconds"}:
        assert re.fullmatch(r"(train|rollout|time|validation)/[a-z_]+", name)


def test_what_is_a_duration_says_its_unit_in_its_name():
    for metric in METRICS:
        assert (metric.unit == "s") == metric.name.endswith("_seconds")
