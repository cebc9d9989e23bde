"""A loss crosses the border to a trainer as JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss, build_loss

parameters = st.dictionaries(
    st.text(max_size=20),
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    max_size=6,
)


@given(st.text(max_size=30), parameters)
def test_a_spec_survives_json_with_the_types_of_its_parameters(name, given_parameters):
    spec = LossSpec(name=name, parameters=given_parameters)
    again = LossSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert {key: type(value) for key, value in again.parameters.items()} == {
        key: type(value) for key, value in given_parameters.items()
    }


@given(st.floats(0, 1), st.floats(0, 10))
def test_the_loss_that_is_built_of_it_is_the_same(low, high):
    loss = PPOClipLoss(clip_low_threshold=low, clip_high_threshold=high)
    assert build_loss(LossSpec.model_validate_json(LossSpec.of(loss).model_dump_json())) == loss


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1], {"a": 1}])
def test_what_json_can_not_carry_is_refused(value):
    with pytest.raises(ValidationError):
        LossSpec(name="a", parameters={"x": value})
