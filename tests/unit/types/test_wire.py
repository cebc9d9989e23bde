from __future__ import annotations

import math

import pytest
from pydantic import BaseModel, ValidationError

from palestra.types import wire
from palestra.types.seat_wire import ObserveSeat
from palestra.types.wire import (
    ClaimEpisode,
    EndEpisode,
    PushTasks,
    TaskBody,
    task_id_of,
)

BODIES = [c for c in vars(wire).values() if isinstance(c, type) and issubclass(c, wire.Body) and c is not wire.Body]
NO_REWARD = ["NaN", "Infinity", "-Infinity", "1e999", "1.1e9", "-1e300", "true", "false", '"1"', '"nan"', "[1]", "{}"]


def end(field: str, value: str) -> EndEpisode:
    """As the gateway does it."""
    return EndEpisode.model_validate_json(f'{{"episode_id": "e", "{field}": {value}}}')


@pytest.mark.parametrize("value", NO_REWARD)
def test_a_reward_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValidationError):
        end("reward", value)
    with pytest.raises(ValidationError):
        end("rewards", f'{{"agent": {value}}}')
    with pytest.raises(ValidationError):
        end("step_rewards", f"[{value}]")


@pytest.mark.parametrize("value", ["0", "-3", "0.25", "1e9", "-1e9", "-0.0"])
def test_a_finite_number_is_a_reward_as_it_is(value):
    assert end("reward", value).reward == float(value)
    assert end("rewards", f'{{"a": {value}}}').rewards == {"a": float(value)}
    assert end("step_rewards", f"[{value}, 1]").step_rewards == (float(value), 1.0)


@pytest.mark.parametrize("field", ["wait_seconds", "allow_discard_timeout"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", True])
def test_a_duration_is_a_number_finite_and_not_negative(field, value):
    with pytest.raises(ValidationError):
        ClaimEpisode.model_validate({"request_id": "r", field: value})
    assert getattr(ClaimEpisode.model_validate({"request_id": "r", field: 2}), field) == 2.0


@pytest.mark.parametrize("value", ["1", True, -1])
def test_a_seat_waits_for_a_number_of_seconds(value):
    with pytest.raises(ValidationError):
        ObserveSeat.model_validate({"episode_id": "e", "wait_seconds": value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**30, "\ud800"])
def test_json_that_the_store_can_not_give_back_as_it_came_is_refused(value):
    """NaN would come back as null; whole numbers over 64 bits and lone surrogates would be an internal error."""
    for place in (value, [value], {"deep": [{"er": value}]}):
        with pytest.raises(ValidationError):
            EndEpisode(episode_id="e", reward=1.0, metadata={"x": place})
        with pytest.raises(ValidationError):
            TaskBody(data={"x": place})


def test_json_of_any_depth_that_can_be_stored_is_taken_as_it_is():
    data = {"a": [1, -(2**63), 2**64 - 1, 0.1, None, True, "é\0"], "b": {"c": {}}}
    assert TaskBody(data=data).data == data


@pytest.mark.parametrize("body", BODIES)
def test_unknown_keys_are_refused(body: type[BaseModel]):
    with pytest.raises(ValidationError) as caught:
        body.model_validate({"no_such_key": 1})
    assert "extra_forbidden" in {error["type"] for error in caught.value.errors()}


def test_names_have_a_length():
    for name in ("", "x" * 201):
        with pytest.raises(ValidationError):
            ClaimEpisode(request_id=name)


def test_a_chunk_has_a_limit():
    task = TaskBody(data={})
    assert len(PushTasks(chunk_id="c", tasks=(task,) * 10_000).tasks) == 10_000
    with pytest.raises(ValidationError):
        PushTasks(chunk_id="c", tasks=(task,) * 10_001)


def test_a_task_without_an_id_gets_one_from_its_data_alone():
    one, two = TaskBody(data={"q": 1}), TaskBody(data={"q": 2})
    assert task_id_of(one) == task_id_of(TaskBody(data={"q": 1}))
    assert task_id_of(one) != task_id_of(two)
    assert task_id_of(TaskBody(id="mine", data={"q": 1})) == "mine"
    assert task_id_of(one) == "t719700ac0e9b489"  # tasks in stores that exist keep their names


@pytest.mark.parametrize(
    ("field", "most", "more"),
    [
        ("rewards", {f"a{k}": 1.0 for k in range(1000)}, {f"a{k}": 1.0 for k in range(1001)}),
        ("step_rewards", [0.5] * 10_000, [0.5] * 10_001),
        ("metadata", {"a": "x" * (65_536 - 8)}, {"a": "x" * (65_536 - 7)}),
    ],
    ids=["rewards", "step_rewards", "metadata"],
)
def test_what_an_end_carries_is_bounded(field, most, more):
    assert getattr(EndEpisode.model_validate({"episode_id": "e", field: most}), field) is not None
    with pytest.raises(ValidationError, match=field):
        EndEpisode.model_validate({"episode_id": "e", field: more})


@pytest.mark.parametrize(("given", "name"), [("q1", "q1"), (7, "7"), (-3, "-3"), ("x" * 200, "x" * 200)])
def test_a_short_text_or_a_whole_number_in_id_names_a_task(given, name):
    assert task_id_of(TaskBody(data={"id": given})) == name
    assert task_id_of(TaskBody(id="sent", data={"id": given})) == "sent"


@pytest.mark.parametrize("given", [None, "", True, 1.5, [1], {"a": 1}, "x" * 201])
def test_any_other_id_names_no_task(given):
    assert task_id_of(TaskBody(data={"id": given})).startswith("t")
