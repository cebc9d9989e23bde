from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.errors import InvalidRequest
from palestra.types.states import TRANSITIONS, JobState
from palestra_control.jobs import (
    JOB_KINDS,
    LIVE_STATES,
    OPEN_STATES,
    PRIORITIES,
    SHARES,
    JobFields,
    JobRecord,
    Resources,
)


@pytest.mark.parametrize(
    "resources",
    [
        {"cpus": 1.0},
        {"cpus": 0.0, "gpus": 0.25},
        {"cpus": 0.0, "gpus": 1.0},
        {"gpus": 8.0, "memory_gib": 0.3333333},
        {"cpus": 0.0001},
        {"cpus": 3.3333},
    ],
)
def test_what_a_machine_may_have_can_be_asked_for_and_is_what_is_held(resources):
    asked = Resources(**resources)
    assert {name: getattr(asked, name) for name in resources} == resources


@pytest.mark.parametrize(
    ("resources", "field"),
    [
        ({"cpus": -1.0}, "cpus"),
        ({"cpus": float("nan")}, "cpus"),
        ({"memory_gib": float("inf")}, "memory_gib"),
        ({"memory_gib": 1e308}, "memory_gib"),
        ({"cpus": 1e305}, "cpus"),
        ({"gpus": 2e307}, "gpus"),
        ({"gpus": 1.5}, "gpus"),
        ({"gpus": 0.12345}, "gpus"),
        ({"cpus": 0.0}, "cpus"),
        ({"cpus": 0.0, "memory_gib": 4.0}, "cpus"),
    ],
)
def test_what_no_machine_has_is_refused_and_the_field_is_named(resources, field):
    with pytest.raises(InvalidRequest) as caught:
        Resources(**resources)
    assert caught.value.field == f"resources.{field}"


@given(st.integers(1, SHARES * 512))
def test_every_whole_number_of_shares_of_a_cpu_can_be_asked_for(shares):
    assert round(Resources(cpus=shares / SHARES).cpus * SHARES) == shares


def test_a_state_is_open_if_it_leads_somewhere():
    assert {state for state in JobState if TRANSITIONS[state]} == OPEN_STATES
    assert OPEN_STATES - {JobState.QUEUED} == LIVE_STATES


def test_priorities_and_kinds_are_the_words_of_the_api():
    assert PRIORITIES == ("low", "normal", "high")
    assert JOB_KINDS == ("training", "inference")


def test_what_the_scheduler_may_set_is_a_field_of_a_job():
    assert set(JobFields.__annotations__) < set(JobRecord.__slots__)
    assert "state" not in JobFields.__annotations__
