"""Data that can't be computed are refused, with the place, the shape and the type."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.errors import InvalidRequest
from palestra_bases.tinker import protobuf
from palestra_bases.tinker.datums import read_batch
from palestra_bases.tinker.protobuf import new
from palestra_bases.tinker.records import TinkerLimits
from unit.tinker.messages import batch_message, datum, tensor

GOOD = {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}


def with_tensor(name: str, made):
    found = datum([1, 2], [2, 3], **GOOD)
    found.loss_fn_inputs[name].CopyFrom(made)
    return found


def sparse(values=(), ends=(0, 0, 0), columns=(), shape=(2, 3), kind="float32"):
    dtype, code = ("<f4", 1) if kind == "float32" else ("<i8", 2)
    parts = {"values": np.asarray(values, dtype), "crow_indices": np.asarray(ends, "<i8")}
    parts["col_indices"] = np.asarray(columns, "<i8")
    made = {name: part.tobytes() for name, part in parts.items()}
    return new("Tensor", dtype=code, shape=shape, sparse_csr=new("Sparse", **made))


def wide(targets, weights=None):
    """A datum of two tokens with several targets each."""
    found = datum([1, 2], [2, 3])
    found.loss_fn_inputs["target_tokens"].CopyFrom(targets)
    if weights is not None:
        found.loss_fn_inputs["weights"].CopyFrom(weights)
    return found


WIDE = tensor([[2, 3, 4], [5, 6, 7]], "int64")


def with_chunk(chunk):
    return new("Datum", model_input=[chunk], loss_fn_inputs=datum([1, 2], [2, 3], **GOOD).loss_fn_inputs)


@pytest.mark.parametrize(
    ("data", "loss", "config", "said"),
    [
        (
            [datum([1, 2], [2, 3], **GOOD)],
            "reinforce",
            None,
            "there is no loss 'reinforce' here; there are cross_entropy",
        ),
        ([], "ppo", None, "1 to 3 datums, and this one 0"),
        ([datum([1, 2], [2, 3], **GOOD)] * 4, "ppo", None, "1 to 3 datums, and this one 4"),
        ([datum([1, 2], [2, 3], **GOOD)], "ppo", {"beta": 1.0}, "the parameters of the loss 'ppo' are"),
        ([datum([1, 2], [2, 3], **GOOD)], "dro", {"beta": float("nan")}, "loss_fn_config.beta is nan"),
        (
            [datum([1, 2], [2, 3], weights=[1.0, 1.0])],
            "ppo",
            None,
            "target_tokens, logprobs, advantages, and not target",
        ),
        ([datum([1, 2], [2, 3], **GOOD, mask=[1.0, 1.0])], "ppo", None, "and not advantages, logprobs, mask, target"),
        ([datum([], [], **{k: [] for k in GOOD})], "ppo", None, "has 0 tokens, and a datum has 1 to 6"),
        ([datum(range(7), range(7), logprobs=[0.0] * 7, advantages=[0.0] * 7)], "ppo", None, "has 7 tokens"),
        ([datum([1, 2], [2, 3, 4], **GOOD)], "ppo", None, "dtype int64 and the shape [3]; ppo takes int64 [2]"),
        (
            [with_tensor("advantages", tensor([1, 2], "int64"))],
            "ppo",
            None,
            "dtype int64 and the shape [2]; ppo takes f",
        ),
        ([with_tensor("advantages", tensor([[1.0, 2.0]]))], "ppo", None, "dtype float32 and the shape [1, 2]"),
        (
            [with_tensor("logprobs", tensor([1.0, 2.0], shape=[3]))],
            "ppo",
            None,
            "shape [3] and the dtype float32, which",
        ),
        ([with_tensor("logprobs", tensor([1.0], shape=[-1]))], "ppo", None, "shape [-1]"),
        ([with_tensor("logprobs", tensor([], shape=[2**40, 2**40]))], "ppo", None, "and there are 0"),
        ([with_tensor("logprobs", sparse())], "ppo", None, "shape [2, 3]; ppo takes float32 [2]"),
        ([with_tensor("logprobs", sparse(shape=[2]))], "ppo", None, "is sparse and has the shape [2]"),
        ([wide(WIDE, sparse(shape=[2**40, 2**40]))], "cross_entropy", None, "and at most 12 numbers"),
        ([wide(WIDE, sparse(ends=[0, 1]))], "cross_entropy", None, "indices do not fit its shape [2, 3]"),
        ([wide(WIDE, sparse([1.0], [0, 1, 1], [3]))], "cross_entropy", None, "indices do not fit its shape [2, 3]"),
        ([wide(WIDE, sparse([1.0], [0, 2, 1], [0]))], "cross_entropy", None, "indices do not fit its shape [2, 3]"),
        ([wide(WIDE, sparse([1.0], [1, 1, 1], [0]))], "cross_entropy", None, "indices do not fit its shape [2, 3]"),
        ([wide(WIDE, tensor([1.0, 1.0]))], "cross_entropy", None, "float32 [2, 3], 3 for each token of model_input"),
        ([wide(WIDE, tensor([[1.0, 1.0, np.nan]] * 2))], "cross_entropy", None, "weights is nan at position [0, 2]"),
        ([wide(WIDE)] * 3, "cross_entropy", None, "may have 0 more targets"),
        ([wide(tensor([[], []], "int64"))], "cross_entropy", None, "shape [2, 0], and this request may have 12"),
        ([wide(tensor([[99], [1]], "int64"))], "cross_entropy", None, "target_tokens has the token 99"),
        ([wide(WIDE), datum([1, 2], [2, 3])], "cross_entropy", None, "equally many"),
        ([with_tensor("target_tokens", WIDE)], "ppo", None, "shape [2, 3]; ppo takes int64 [2]"),
        (
            [with_tensor("logprobs", new("Tensor", dense=b"12345678", dtype=4, shape=[2]))],
            "ppo",
            None,
            "dtype number 4",
        ),
        ([with_tensor("advantages", tensor([1.0, np.nan]))], "ppo", None, "advantages is nan at position 1"),
        ([with_tensor("logprobs", tensor([-np.inf, 1.0]))], "ppo", None, "logprobs is -inf at position 0"),
        ([datum([1, 2], [2, 3], **GOOD)], "gspo", None, "are target_tokens, logprobs, advantages, sequence_ratio_mask"),
        (
            [datum([1, 2], [2, 3], sequence_ratio_mask=[0.5, 1.0], **GOOD)],
            "gspo",
            None,
            "sequence_ratio_mask has numbers other than 0 and 1",
        ),
        ([datum([1, 2], [2, 3], sequence_ratio_mask=[0, 0], **GOOD)], "gspo", None, "the sequence has no ratio"),
        ([datum([1, 99], [2, 3], **GOOD)], "ppo", None, "model_input has the token 99; the model's are 0 to 49"),
        ([datum([1, 2], [2, -1], **GOOD)], "ppo", None, "target_tokens has the token -1"),
        ([with_chunk(new("Chunk", image=new("Image", data=b"x")))], "ppo", None, "has a chunk image"),
        ([with_chunk(new("Chunk", encoded_text=new("Text", tokens=b"123")))], "ppo", None, "int32 tokens"),
        ([with_chunk(new("Chunk"))], "ppo", None, "has a chunk None"),
    ],
)
def test_what_does_not_fit_is_refused(data, loss, config, said):
    with pytest.raises(InvalidRequest) as error:
        read_batch(batch_message(data, loss, config), 50, 6, TinkerLimits(datums=3, targets=12))
    assert said in str(error.value)
    if "datum" not in said and "loss" not in said:
        assert str(error.value).startswith("data.")


def test_a_sparse_tensor_is_zero_where_it_lists_nothing():
    targets = sparse([4, 5, 6], [0, 2, 3], [0, 2, 1], kind="int64")
    batch = read_batch(batch_message([wide(targets, sparse([0.5], [0, 0, 1], [1]))]), 50, 6, TinkerLimits())
    assert batch.several == 3
    assert [row.targets[1:].tolist() for row in batch.rows] == [[4, 0], [0, 6], [5, 0]]
    assert [row.loss_weights[1:].tolist() for row in batch.rows] == [[0.0, 0.0], [0.0, 0.5], [0.0, 0.0]]
    assert all(row.ids.tolist() == [1, 2, 2] for row in batch.rows)


def test_a_text_in_the_place_of_a_number_is_refused():
    message = batch_message([datum([1, 2], [2, 3], **GOOD)], "ppo")
    message.loss_fn_config_v2["clip_low_threshold"].text = "0.5"
    with pytest.raises(InvalidRequest, match="is a text"):
        read_batch(message, 50, 6, TinkerLimits())


def test_the_newer_form_of_a_number_wins():
    message = batch_message([datum([1, 2], [2, 3], **GOOD)], "ppo", {"clip_low_threshold": 0.5})
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.25
    assert read_batch(message, 50, 6, TinkerLimits()).loss.parameters == {"clip_low_threshold": 0.25}


@given(body=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body):
    try:
        message = protobuf.parse("ForwardBackwardRequest", body)
        read_batch(message, 50, 6, TinkerLimits())
    except InvalidRequest:
        return
