"""The closed forms against tables of others and numerical integration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from palestra.runtime.scores import estimate, student_t, t_quantile

# Two-sided 95 % and 99 % quantiles, from the table of the NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
NIST = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604), 5: (2.571, 4.032),
        9: (2.262, 3.250), 10: (2.228, 3.169), 24: (2.064, 2.797), 30: (2.042, 2.750), 100: (1.984, 2.626)}  # fmt: skip


@pytest.mark.parametrize("degrees", NIST)
def test_quantiles_are_those_of_the_table(degrees):
    found = [t_quantile(probability, degrees) for probability in (0.95, 0.99)]
    assert found == pytest.approx(NIST[degrees], abs=6e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 8, 19, 60])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 8.0])
def test_the_closed_form_is_the_integral_of_the_density(degrees, t):
    scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    x = np.linspace(-t, t, 200_001)
    density = np.exp(scale - (degrees + 1) / 2 * np.log1p(x * x / degrees))
    assert student_t(t, degrees) == pytest.approx(np.trapezoid(density, x), abs=1e-8)


def test_the_interval_of_five_values_is_that_of_a_textbook():
    """Mean 5, standard deviation sqrt(2.5), 2.776 standard errors: 1.963."""
    found = estimate([3.0, 4.0, 5.0, 6.0, 7.0])
    assert (found.mean, found.count) == (5.0, 5)
    assert found.half == pytest.approx(2.7764451 * math.sqrt(2.5 / 5))
    assert estimate([3.0]).half is None
    assert estimate([2.0, 2.0]).half == 0.0
