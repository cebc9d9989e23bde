"""What is sent arrives as it was, and what is no message, or of other types, is refused."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.backend.frames import MOST_CONTAINERS, MOST_HEADER, MOST_VALUES, read_frame, write_frame
from palestra.backend.typed import typed
from palestra.config import AdapterConfig
from palestra.engine.base import EngineRequest
from palestra.errors import InvalidRequest
from palestra.trainer.base import OptimParams, PolicySpec, StepReport
from palestra.types.calls import GrammarSpan, PolicyVersion, SampledTokens, SamplingParams, TokenSequence
from palestra.types.records import TrainSample
from unit.building import make_sample

REQUEST = EngineRequest(
    policy="policy",
    prompt=TokenSequence(np.arange(5, dtype=np.int32)),
    sampling=SamplingParams(temperature=0.7, max_tokens=3, seed=2**63, logit_bias=((3, -1.5),), stop_ids=(7,)),
)
REPORT = StepReport(
    rows=1, trained_tokens=2, forward_tokens=3, flat_tokens=4, metrics={"loss": float("nan"), "x": 0.1}, logprobs=None
)
PIECE = SampledTokens(ids=(1, 2), logprobs=(-0.1, -1e-8), version=PolicyVersion(1, 2), top=(((1, -0.1),), ((2, -0.2),)))


def there_and_back(hint: Any, value: Any) -> Any:
    frame = read_frame(write_frame({"value": value}))
    return typed(hint, frame.header["value"], frame.arrays, "value")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other or (one != one and other != other)


@pytest.mark.parametrize(
    "value",
    [
        REQUEST,
        REPORT,
        PIECE,
        PolicySpec(model="m", adapter=AdapterConfig(rank=3, targets=["q_proj"]), critic="states", seed=4),
        OptimParams(learning_rate=1e-3, betas=(0.1, 0.2)),
        LossSpec.of(PPOClipLoss()),
        replace(make_sample([1, 2, 3, 4], [2, 3]), grammars=(GrammarSpan(start=2, tokens=2, grammar="{}"),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_record_arrives_as_it_was(value):
    assert same(there_and_back(type(value), value), value)


@given(
    st.lists(st.floats(width=32), max_size=20), st.lists(st.floats(allow_nan=True), max_size=5), st.integers(0, 2**80)
)
def test_numbers_keep_all_their_bits(single, double, whole):
    array = np.asarray(single, np.float32)
    frame = read_frame(write_frame({"a": array, "b": double, "c": whole}))
    assert frame.arrays[0].tobytes() == array.tobytes()
    assert same(tuple(frame.header["b"]), tuple(double))
    assert frame.header["c"] == whole


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(InvalidRequest):
        read_frame(data)


@pytest.mark.parametrize(
    "header",
    [
        b'{"arrays":[["i4",-1]]}',
        b'{"arrays":[["i4",0,1000000000000000000000000000000]]}',
        b'{"arrays":[["i4",1000000000000000000000000000000]]}',
        b'{"arrays":[["i4",1.0]]}',
        b'{"arrays":[["i4"' + b",1" * 9 + b"]]}",
        b'{"arrays":[["i4",true]]}',
        b'{"arrays":[[[],1]]}',
        b'{"arrays":{"i4":1}}',
        b'{"arrays":"i4"}',
        b"[[]]",
        b"null",
        b"[" * 200_000,
        b'{"id":' + b"9" * 5000 + b',"arrays":[]}',
        b'{"arrays":[],"a":[' + b"{}," * (MOST_CONTAINERS + 1) + b"1]}",
        b'{"arrays":[],"a":[' + b"1," * (MOST_VALUES + 1) + b"1]}",
        b'{"arrays":[],"a":"' + b"x" * MOST_HEADER + b'"}',
    ],
    ids=lambda header: header[:24].decode(),
)
def test_a_header_that_is_none_is_refused(header):
    with pytest.raises(InvalidRequest):
        read_frame(struct.pack("<I", len(header)) + header + b"1234")


@pytest.mark.parametrize(("unit", "times"), [(b"{},", MOST_HEADER // 3), (b"1,", MOST_HEADER)])
def test_a_long_header_is_refused_before_it_is_parsed(unit, times):
    header = b'{"arrays":[],"a":[' + unit * times + b"1]}"
    data = struct.pack("<I", len(header)) + header
    tracemalloc.start()
    with pytest.raises(InvalidRequest):
        read_frame(data)
    assert tracemalloc.get_traced_memory()[1] < 1.1 * len(data)
    tracemalloc.stop()


def test_a_message_with_more_or_fewer_bytes_than_it_says_is_refused():
    whole = write_frame({"a": np.arange(4, dtype=np.int32)})
    for data in (whole[:-1], whole + b"x"):
        with pytest.raises(InvalidRequest):
            read_frame(data)


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (EngineRequest, {"policy": 3, "prompt": None, "sampling": None}, "value.policy"),
        (EngineRequest, {"policy": "p"}, "prompt"),
        (OptimParams, {"learning_rate": "fast"}, "value.learning_rate"),
        (OptimParams, {"learning_rate": 2**80}, "value"),
        (OptimParams, {"learning_rate": True}, "value.learning_rate"),
        (PolicySpec, {"model": "m", "critic": "all"}, "value.critic"),
        (PolicySpec, {"model": "m\0"}, "value"),
        (PolicySpec, {"model": "\ud800"}, "value"),
        (PolicySpec, {"model": "m", "adapter": {"rank": 0}}, "greater than or equal to 1"),
        (TrainSample, {"episode_id": "e", "policy": "p", "ids": {"array": 7}}, "no array"),
        (tuple[int, ...], [1, True], r"value\[1\]"),
        (list[int], {"0": 1}, "array"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(hint, value, said):
    if hint is TrainSample:
        value = read_frame(write_frame({"v": make_sample([1, 2], [1])})).header["v"] | value
    with pytest.raises(InvalidRequest, match=said):
        typed(hint, value, (), "value")


def test_an_array_of_other_numbers_is_refused():
    frame = read_frame(write_frame({"v": np.ones(3, np.float32)}))
    sample = read_frame(write_frame({"v": make_sample([1, 2], [1])}))
    wrong = sample.header["v"] | {"ids": {"array": 0}}
    with pytest.raises(InvalidRequest, match="an array of float32, and not of int32"):
        typed(TrainSample, wrong, frame.arrays * 9, "value")


def test_a_path_is_a_text_and_what_can_not_be_sent_is_said():
    assert there_and_back(Path, Path("/a/b")) == Path("/a/b")
    with pytest.raises(TypeError, match="object can't be sent"):
        write_frame({"a": object()})
    with pytest.raises(TypeError, match="float64 can't be sent"):
        write_frame({"a": np.ones(2)})
