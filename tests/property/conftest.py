"""Hypothesis draws the same examples in every run; with `--hypothesis-profile=search` it draws new ones."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "palestra",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=1000, database=None)
settings.load_profile("palestra")
