"""What is sent arrives as it was, and what is of another type is refused."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import AdapterConfig
from palestra.errors import ContextOverflow, InvalidAlgorithm, InvalidRequest
from palestra.process.codec import SentError, decode, encode
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.types.calls import PolicyVersion, SampledTokens, SamplingParams
from palestra.types.records import TrainSample
from unit.building import make_sample


@dataclass(frozen=True, kw_only=True)
class Odd:
    folder: Path
    numbers: NDArray[np.float32] | None = None
    anything: NDArray[Any] | None = None


@pytest.mark.parametrize(
    "value",
    [
        SampledTokens(
            ids=(1, 2), logprobs=(-0.1, -1e-8), version=PolicyVersion(1, 2), top=(((1, -0.1),), ((2, -0.2),))
        ),
        PolicySpec(model="m", adapter=AdapterConfig(rank=3, targets=["q_proj"]), critic="states", seed=4),
        OptimParams(learning_rate=1e-3, betas=(0.1, 0.2)),
        LossSpec.of(PPOClipLoss()),
        Odd(folder=Path("/a/ä")),
        SamplingParams(temperature=0.7, max_tokens=3, seed=2**63, logit_bias=((3, -1.5),), stop_ids=(7,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_record_arrives_as_it_was(value):
    assert decode(type(value), encode(value)) == value


def test_a_row_arrives_with_arrays_that_may_be_written_to():
    sample = make_sample([1, 2, 3, 4], [2, 3])
    found = decode(TrainSample, encode(sample))
    for name in ("ids", "loss_mask", "logprobs", "versions"):
        own, sent = getattr(sample, name), getattr(found, name)
        assert sent.dtype == own.dtype
        assert sent.tobytes() == own.tobytes()
        assert sent.flags.writeable


@given(st.lists(st.floats(width=32), max_size=20), st.lists(st.floats(allow_nan=True), max_size=5))
def test_numbers_keep_all_their_bits(single, double):
    array = np.asarray(single, np.float32)
    assert decode(NDArray[np.float32], encode(array)).tobytes() == array.tobytes()
    assert np.asarray(decode(list[float], encode(double))).tobytes() == np.asarray(double).tobytes()


class Version(str):
    """As torch has one."""


class Count(int):
    """As a library may have one."""


def test_numbers_and_texts_of_other_classes_arrive_plain():
    for value, plain in ((Version("2.13"), "2.13"), (Count(3), 3), (np.float32(0.5), 0.5), (np.float64(0.1), 0.1)):
        found = decode(Any, encode(value))
        assert (found, type(found)) == (plain, type(plain))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 0, 4)])
def test_an_array_keeps_its_shape(shape):
    assert decode(NDArray[Any], encode(np.ones(shape, np.int64))).shape == shape


@pytest.mark.parametrize(
    "sent",
    [
        np.ones(3, np.float64),
        ["<f4", [2], b"1234"],
        ["<f4", [-1], b"1234"],
        ["<f4", [True], b"1234"],
        ["<f4", [2**62, 4], b""],
        ["<f4", [0] * 9, b""],
        ["|O", [1], b"12345678"],
        ["<f4", 1, b"1234"],
        [["<f4"], [1], b"1234"],
        ["<f4", [1], "1234"],
        "<f4",
        7,
    ],
)
def test_what_is_no_such_array_is_refused_with_its_place(sent):
    with pytest.raises(InvalidRequest, match=r"\$\.numbers"):
        decode(Odd, encode({"folder": "x", "numbers": sent}))


@pytest.mark.parametrize(
    ("kind", "value", "place"),
    [
        (Odd, {"folder": 3}, r"\$\.folder"),
        (OptimParams, {"learning_rate": "fast"}, r"\$\.learning_rate"),
        (OptimParams, {}, "learning_rate"),
        (PolicySpec, {"model": "m", "critic": "all"}, r"\$\.critic"),
        (PolicySpec, {"model": "m", "adapter": {"rank": 0}}, r"\$\.adapter"),
        (tuple[int, ...], [1, True], r"\$\[1\]"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(kind, value, place):
    with pytest.raises(InvalidRequest, match=place):
        decode(kind, encode(value))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(InvalidRequest):
        decode(TrainSample, data)


@pytest.mark.parametrize("data", [b"\xa3\xed\xa0\x80", b"\x91" * 200_000, b"\xdd" + b"\xff" * 4, b"\xc1", b""])
def test_bytes_that_are_no_value_are_refused(data):
    with pytest.raises(InvalidRequest):
        decode(Any, data)


def test_a_path_leads_to_the_same_file_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert decode(Path, encode(Path("run"))) == tmp_path / "run"


def test_half_a_surrogate_pair_is_not_sent():
    with pytest.raises(InvalidRequest):
        encode({"model": "\ud800"})


@pytest.mark.parametrize("value", [object(), {"a": 2**64}, np.ones(1, np.complex64)])
def test_what_can_not_be_sent_is_said_at_once(value):
    with pytest.raises((TypeError, OverflowError)):
        encode(value)


@pytest.mark.parametrize(
    "error", [InvalidAlgorithm("a loss is not a number"), ValueError("odd"), ContextOverflow(5, 3)]
)
def test_an_error_arrives_as_one_of_its_class(error):
    found = SentError.of(error).error()
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_an_error_of_the_system_keeps_its_number():
    found = msgspec.msgpack.decode(encode(SentError.of(OSError(errno.ENOSPC, "full"))), type=SentError).error()
    assert isinstance(found, OSError)
    assert (found.errno, str(found)) == (errno.ENOSPC, "[Errno 28] full")


def test_an_error_of_another_package_is_sent_as_text():
    found = SentError.of(np.exceptions.AxisError("odd")).error()
    assert type(found) is RuntimeError
    assert str(found) == "AxisError: odd"
