"""A run store on a clock that stands until a test moves it."""

from __future__ import annotations

import pytest

from unit.building import FakeClock, open_store


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path, FakeClock(), max_attempts=1) as opened:
        yield opened
