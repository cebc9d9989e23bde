"""What `pytest tests/core` hides; collected by that command only."""

from __future__ import annotations

import importlib
from importlib.metadata import distribution

import pytest

from palestra import extensions


@pytest.mark.parametrize("package", ["palestra_service", "palestra_engines", "palestra_cpu", "palestra_worlds.gomoku"])
def test_a_package_beside_the_core_can_not_be_imported(package):
    with pytest.raises(ModuleNotFoundError, match=package.partition(".")[0]):
        importlib.import_module(package)


def test_entry_points_are_those_of_the_core():
    for group in {point.group for point in distribution("palestra").entry_points}:
        assert not [point for point in extensions.entry_points(group=group) if point.value.startswith("palestra_")]
