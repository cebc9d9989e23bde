"""A run store on a clock that stands until a test moves it."""

from __future__ import annotations

import pytest

from unit.building import FakeClock, open_store


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(tmp_path, clock):
    with open_store(tmp_path, clock) as opened:
        yield opened
