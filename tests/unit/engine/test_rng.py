from __future__ import annotations

from itertools import pairwise

import pytest

from palestra.engine.base import uniform


def test_numbers_are_in_the_unit_interval_and_distinct():
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0.0 <= u < 1.0 for u in numbers)
    assert len(set(numbers)) == len(numbers)


def test_a_number_depends_on_seed_and_position_alone():
    assert uniform(1, 23) == uniform(1, 23)
    assert uniform(1, 23) != uniform(12, 3)
    # Golden values: other numbers would give other samples to every run that is replayed.
    assert [uniform(0, 0), uniform(2**63 - 1, 41)] == [0.3859926107094097, 0.4107360682043779]


def test_the_largest_and_the_smallest_digest_stay_inside(monkeypatch):
    class Digest:
        def __init__(self, content: bytes) -> None:
            self.content = content

        def digest(self) -> bytes:
            return self.content

    for content, wanted in ((b"\0" * 8, 0.0), (b"\xff" * 8, 1 - 2.0**-53)):
        monkeypatch.setattr("hashlib.blake2b", lambda *_, content=content, **__: Digest(content))
        assert uniform(0, 0) == wanted


def test_numbers_are_spread_evenly():
    """Chi-square over 20 bins, 10,000 draws: 43.8 would be exceeded once in a thousand times."""
    bins = [0] * 20
    for position in range(10_000):
        bins[int(uniform(7, position) * 20)] += 1
    assert sum((n - 500) ** 2 / 500 for n in bins) < 43.8


def test_neighbouring_positions_are_not_correlated():
    numbers = [uniform(3, position) - 0.5 for position in range(10_000)]
    products = [a * b for a, b in pairwise(numbers)]
    assert sum(products) / len(products) == pytest.approx(0.0, abs=4 * (1 / 12) / 100)
