"""Every fault of the table that can be tried. Cells of one moment share a machine, so they are played in this order."""

from __future__ import annotations

import pytest

from faults.cells import BACKENDS, CELLS, Cell, impossible
from faults.invariants import assert_everything_can_be_had
from faults.provoking import play

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
POSSIBLE = [cell for cell in CELLS if impossible(cell) is None and cell.component not in BACKENDS]


@pytest.mark.parametrize("cell", POSSIBLE, ids=lambda cell: cell.name)
def test_after_a_fault_the_job_ends_as_if_nothing_had_happened(world, cell: Cell):
    world.keep_only(cell.moment.fault(cell.component))
    play(world, cell)


def test_after_all_of_it_a_job_that_needs_everything_starts(world):
    assert_everything_can_be_had(world)
