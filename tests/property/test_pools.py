"""Which past version plays: a pure function, with the frequencies that the configuration says."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.config import PoolConfig

DRAWS = 4000
FAR = 5.0  # standard deviations: in all examples together, chance is not as far away once in ten thousand runs
POOLS = st.builds(
    PoolConfig,
    every_steps=st.integers(1, 20),
    size=st.integers(1, 12),
    choice=st.sampled_from(["uniform", "prioritized"]),
    latest_share=st.floats(0, 0.9),
)
STEPS = st.integers(0, 500)


@given(pool=POOLS, done=STEPS)
def test_a_pool_has_the_newest_versions_and_no_more_than_its_size(pool, done):
    versions = pool.versions(done)
    assert 1 <= len(versions) <= pool.size
    assert list(versions) == sorted(set(versions))
    assert all(version % pool.every_steps == 0 and 0 <= version <= done for version in versions)
    assert done - versions[-1] < pool.every_steps  # none that is newer is missing
    assert len(versions) == pool.size or versions[0] == 0  # and none that is older, while there is room
    assert all(later - earlier == pool.every_steps for earlier, later in pairwise(versions))


@given(pool=POOLS, done=STEPS, more=st.integers(0, 50))
def test_a_version_that_has_left_never_comes_back(pool, done, more):
    assert min(pool.versions(done)) <= min(pool.versions(done + more))


@given(pool=POOLS, done=STEPS, key=st.text(max_size=20), rate=st.floats(0.01, 0.99))
def test_the_choice_is_a_pure_function_of_its_arguments(pool, done, key, rate):
    versions = pool.versions(done)
    rates = dict.fromkeys(versions, rate)
    drawn = pool.draw(key, versions, rates)
    assert drawn == PoolConfig(**pool.model_dump()).draw(key, tuple(versions), dict(rates))
    assert drawn is None or drawn in versions


@settings(max_examples=20, deadline=None)
@given(
    pool=POOLS, done=STEPS, rates=st.lists(st.floats(0.02, 0.98), min_size=12, max_size=12), name=st.text(max_size=5)
)
def test_versions_are_drawn_as_often_as_the_closed_form_says(pool, done, rates, name):
    versions = pool.versions(done)
    known = dict(zip(versions, rates, strict=False))
    drawn = Counter(pool.draw(f"{name}/{number}", versions, known) for number in range(DRAWS))
    weights = [1.0 if pool.choice == "uniform" else (1 - known[version]) ** 2 for version in versions]
    shares = {version: (1 - pool.latest_share) * w / sum(weights) for version, w in zip(versions, weights, strict=True)}
    for version, share in {**shares, None: pool.latest_share}.items():
        deviation = math.sqrt(DRAWS * share * (1 - share)) if 0 < share < 1 else 0.0
        assert abs(drawn[version] - DRAWS * share) <= FAR * deviation + 1
