"""The rows of the table whose components are processes of a job: its engine workers, and the ranks of its trainer."""

from __future__ import annotations

import functools

import pytest

from faults import backends
from faults.cells import BACKENDS, CELLS, Cell, impossible

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
POSSIBLE = [cell for cell in CELLS if impossible(cell) is None and cell.component in BACKENDS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The job of a component that nothing has disturbed, by the component."""
    return functools.cache(lambda name: backends.undisturbed(name, tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.parametrize("cell", POSSIBLE, ids=lambda cell: cell.name)
def test_after_a_fault_the_job_ends_as_if_nothing_had_happened(cell: Cell, undisturbed, tmp_path):
    backends.play(cell, tmp_path, undisturbed)
