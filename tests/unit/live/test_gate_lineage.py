"""From which versions the weights in training descend, against a walk from step to step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra_live.gate.lineage import Lineage, Return

pytestmark = pytest.mark.ci


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    """A run that returns now and then to any version that it has made."""
    made = Lineage()
    for step in range(1, 15):
        if draw(st.integers(0, 3)) == 0:
            made = made.with_return(step, draw(st.integers(0, step - 1)))
    return made


def walked(lineage: Lineage, step: int) -> dict[int, int]:
    """Return the age of each ancestor of the weights after a step, by walking to their parents one after another."""
    returned = dict(lineage.returns)
    if step in returned:  # the weights after a return are those of the version itself
        step = returned[step]
    found, age = {}, 0
    while True:
        found[step] = age
        if step == 0:
            return found
        step = returned.get(step - 1, step - 1)
        age += 1


@given(lineages(), st.integers(0, 14), st.integers(-1, 20))
def test_the_age_is_the_number_of_steps_on_the_way_to_an_ancestor(lineage: Lineage, step: int, version: int) -> None:
    assert lineage.age(step, version) == walked(lineage.before(step), step).get(version)


def test_weights_stray_when_they_descend_from_a_failed_version_or_not_from_the_live_one() -> None:
    made = Lineage()
    assert not made.strays(7, 3, {1, 2})  # before the live version
    assert made.strays(7, 3, {5})
    assert made.strays(2, 3, set())
    made = made.with_return(7, 3)
    assert not made.strays(7, 3, {5})
    assert not made.strays(9, 3, {5, 7})
    assert (made.age(9, 3), made.age(9, 8), made.age(9, 5), made.age(9, 7)) == (2, 1, None, None)
    assert made.before(6) == Lineage()
    assert made.with_return(7, 0).returns == (Return(7, 0),)
