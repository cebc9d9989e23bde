"""Weights that travel in a file: the same bits, at the precision that was asked for, or a plain error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from palestra.errors import ModelError
from palestra.models.tensor_file import write_weights
from palestra.models.weights import FileWeights, LocalWeights, weight_folder

NAMED = [("a.weight", torch.randn(3, 5)), ("b.weight", torch.randn(7, dtype=torch.bfloat16)), ("c", torch.zeros(0, 2))]


def test_what_is_read_is_what_was_written(tmp_path):
    written = write_weights(LocalWeights(NAMED), tmp_path / "weights")
    read = dict(written.tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert sorted(read) == sorted(name for name, _ in NAMED)
    for name, tensor in NAMED:
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_weights_are_rounded_once_to_the_precision_of_the_engine(tmp_path):
    read = dict(write_weights(LocalWeights(NAMED), tmp_path / "weights", torch.bfloat16).tensors())
    assert torch.equal(read["a.weight"], NAMED[0][1].bfloat16())


def test_a_transposed_tensor_and_one_that_needs_gradients_are_written(tmp_path):
    matrix = torch.randn(3, 5, requires_grad=True)
    read = dict(write_weights(LocalWeights([("w", matrix.T)]), tmp_path / "weights").tensors())
    assert torch.equal(read["w"], matrix.detach().T)


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no disk that is always full")
    (tmp_path / "weights.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="space left"):
        write_weights(LocalWeights([("w", torch.zeros(2**21))]), tmp_path / "weights")
    assert not list(tmp_path.iterdir())


def test_a_new_version_replaces_the_file_while_the_old_one_is_read(tmp_path):
    source = LocalWeights([("w", torch.zeros(4)), ("x", torch.zeros(4))])
    reading = write_weights(source, tmp_path / "weights").tensors()
    next(reading)
    write_weights(LocalWeights([("w", torch.ones(4)), ("x", torch.ones(4))]), tmp_path / "weights")
    assert next(reading)[1].sum() == 0
    assert dict(FileWeights(tmp_path / "weights").tensors())["x"].sum() == 4


def test_a_damaged_or_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"read.*missing"):
        list(FileWeights(tmp_path / "missing").tensors())
    (tmp_path / "damaged").write_bytes(b"\x10\0\0\0\0\0\0\0{not json at all")
    with pytest.raises(ModelError, match=r"read.*damaged"):
        list(FileWeights(tmp_path / "damaged").tensors())


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="weights"):
        write_weights(LocalWeights(NAMED), tmp_path / "missing" / "weights")


def test_the_folder_for_weights_can_be_written_to():
    assert weight_folder().is_dir()
