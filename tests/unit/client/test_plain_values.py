"""Values of users where data enters: taken as numbers, lists and texts, or refused with place, type and remedy."""

from __future__ import annotations

import math
from contextlib import closing
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from palestra.client.plain_values import plain_object, rows_of_frame
from palestra.client.protocol import finish_call
from palestra.client.task_files import task_source
from palestra.errors import InvalidRequest
from palestra.rollout.result import EpisodeResult
from unit.client.building import EPISODE


def taken(rows):
    with closing(task_source(rows, "tasks")) as source:
        return list(source)


class Level(str, Enum):  # noqa: UP042 - as users write it
    HARD = "hard"


TAKEN = [
    (np.int64(3), 3),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.float32(0.5), 0.5),
    (np.float64(0.1), 0.1),
    (np.bool_(True), True),
    (np.str_("é"), "é"),
    (Level.HARD, "hard"),
    ({Level.HARD: [Level.HARD]}, {"hard": ["hard"]}),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (np.array(1.5), 1.5),
    (np.array(["a", None], dtype=object), ["a", None]),
    (np.datetime64("2024-01-01T10:00:00.000000001"), "2024-01-01T10:00:00"),
    (datetime(2024, 1, 1, tzinfo=UTC), "2024-01-01T00:00:00+00:00"),
    (date(2024, 1, 1), "2024-01-01"),
    (time(12, 30), "12:30:00"),
    (Decimal("0.1"), 0.1),
    (Decimal(3), 3.0),
    (Fraction(1, 4), 0.25),
    ((1, [np.int8(2)], {"a": np.int16(3)}), [1, [2], {"a": 3}]),
    (2**63, 2**63),
]


@pytest.mark.parametrize(("value", "plain"), TAKEN)
def test_values_with_a_form_in_json_are_taken_wherever_data_enters(value, plain):
    (row,) = taken([{"x": value}])
    assert row == {"x": plain}
    assert type(row["x"]) is type(plain)
    assert finish_call(EPISODE, 1.0, metadata={"x": value}).body.metadata == {"x": plain}


REFUSED = [
    (math.nan, "float"),
    (np.float32("inf"), "numpy.float32"),
    (2**64, "int"),
    (-(2**63) - 1, "int"),
    (np.array([1.0, np.nan]), "float"),
    (np.datetime64("NaT"), "numpy.datetime64"),
    (np.timedelta64(1, "s"), "numpy.timedelta64"),
    (1j, "complex"),
    ({1, 2}, "set"),
    (b"x", "bytes"),
    (Path("x"), "pathlib"),
    (Decimal("0.1000000000000000000000001"), "decimal.Decimal"),
    (Decimal("nan"), "decimal.Decimal"),
    (Fraction(1, 3), "fractions.Fraction"),
    ("\ud800", "str"),
    ({3: "x"}, "int"),
]


@pytest.mark.parametrize(("value", "kind"), REFUSED)
def test_what_can_not_be_stored_is_refused_with_task_key_and_type(value, kind):
    rows = [{"id": "q0", "a": {"x": 1}}, {"id": "q1", "a": {"x": value}}]
    with pytest.raises(InvalidRequest) as caught:
        taken(rows)
    for part in ("task 1", "'q1'", "'a'", "'x'", kind):
        assert part in str(caught.value)
    with pytest.raises(InvalidRequest, match="metadata: 'x'"):
        finish_call(EPISODE, 1.0, metadata={"x": value})


def test_what_contains_itself_is_refused():
    loop: dict = {}
    loop["x"] = loop
    with pytest.raises(InvalidRequest):
        plain_object(loop, "metadata")


def test_the_information_of_an_environment_shows_numbers_as_numbers():
    result = EpisodeResult()
    result.note("0", {"n": np.int64(3), "a": np.array([1, 2]), "x": {1, 2}})
    assert result.info["0"] == '{"n": 3, "a": [1, 2], "x": "{1, 2}"}'


class Pandas:
    """The part of a DataFrame of pandas that is used."""

    def __init__(self):
        self.iloc = self

    def __len__(self):
        return 2

    def __getitem__(self, part):
        assert part == slice(0, 1000)
        return self

    def to_dict(self, form):
        assert form == "records"
        return [{"prompt": "a", "x": 1.5}, {"prompt": "b", "x": math.nan}]


class Polars:
    columns = ("prompt", "x")

    def iter_rows(self, *, named):
        assert named
        return iter([{"prompt": "a", "x": 1.5}, {"prompt": "b", "x": None}])


@pytest.mark.parametrize("frame", [Pandas(), Polars()])
def test_the_rows_of_a_frame_are_tasks_and_missing_values_none(frame):
    rows = [{"prompt": "a", "x": 1.5}, {"prompt": "b", "x": None}]
    assert taken(frame) == list(rows_of_frame(frame)) == rows


def test_real_frames_are_tasks():
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    rows = [{"id": 1, "prompt": "a", "x": 1.5}, {"id": 2, "prompt": "b", "x": None}]
    for frame in (pandas.DataFrame(rows), polars.DataFrame(rows)):
        assert taken(frame) == rows
