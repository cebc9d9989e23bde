"""One number of many micro-batches, however the tokens are cut into them."""

from __future__ import annotations

import math

import pytest
import torch

from palestra.algorithms.loss import Max, Mean, Sum
from palestra.trainer.metrics import MetricSums

NAMES = ("mean", "some", "sum", "max")


def reduced(values: list[float], counted: list[bool], cuts: list[int]) -> dict[str, float]:
    sums = MetricSums(NAMES)
    for start, stop in zip([0, *cuts], [*cuts, len(values)], strict=True):
        part = torch.tensor(values[start:stop])
        over = torch.tensor(counted[start:stop], dtype=torch.bool)
        sums.add({"mean": Mean(part), "some": Mean(part, over=over), "sum": Sum(part), "max": Max(part)})
    return sums.result(len(values))


@pytest.mark.parametrize("cuts", [[], [2], [0, 3], [1, 2, 3, 4]])
def test_each_rule_is_what_its_name_says(cuts):
    found = reduced([1.0, -2.0, 4.0, 0.5, 8.0], [True, False, True, False, False], cuts)
    assert found == {"mean": 11.5 / 5, "some": 2.5, "sum": 11.5, "max": 8.0}


def test_the_largest_of_negative_numbers_is_negative():
    assert reduced([-3.0, -2.0], [True, True], [1])["max"] == -2.0


def test_where_no_token_counts_a_mean_over_some_is_not_a_number_and_the_others_are_0():
    assert math.isnan(reduced([1.0], [False], [])["some"])
    found = reduced([], [], [])
    assert (found["mean"], found["sum"], found["max"]) == (0.0, 0.0, 0.0)


def test_a_name_that_is_not_declared_is_refused():
    with pytest.raises(ValueError, match="'other'"):
        MetricSums(NAMES).add({"other": Sum(torch.zeros(1))})
