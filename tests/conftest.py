"""What all tests share: quiet arithmetic, no network, and the examples that hypothesis draws.

With the profile `quick`, the one of `make test`, and with `full`, that of `make test-rest`, hypothesis draws the same
examples in every run; with `--hypothesis-profile=search` it draws new ones.
"""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from palestra.models.device import reproducible_products

# Helpers of several folders, whose assertions are to say what differs; it has to be said before one imports them.
pytest.register_assert_rewrite("outcome", "servers")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order, and no quarrel about the cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Before the first product of this process, as a deterministic job does it in its own. Processes that tests start do it
# themselves (`environment` of integration/servers.py does not pass the variable on).
reproducible_products()

settings.register_profile(
    "quick",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", settings.get_profile("quick"))
settings.register_profile("search", deadline=None, max_examples=1000, database=None)
settings.load_profile("quick")

# What pytest makes of the assertions of tests is kept for the next run even where PYTHONDONTWRITEBYTECODE is set: each
# worker takes longer to make it than to import all tests. While tests run, the setting holds again.
_kept, sys.dont_write_bytecode = sys.dont_write_bytecode, False


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = _kept
