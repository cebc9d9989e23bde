"""Files of tensors: what the library of their format reads is what was written, at places that fit."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from palestra.models import tensor_file
from palestra.models.tensor_file import write_tensors


@pytest.mark.parametrize("dtype", list(tensor_file._KINDS))
def test_the_library_of_the_format_reads_what_was_written(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(tensor_file, "_PIECE", 7)
    bytes_ = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 3 * dtype.itemsize), dtype=torch.uint8)
    named = {
        "é": torch.tensor(True),
        "odd": torch.arange(3).to(torch.int8),
        "w": bytes_.view(dtype),
        "one": torch.ones(1),
    }
    write_tensors(list(named.items()), tmp_path / "weights")
    read = safetensors.torch.load_file(tmp_path / "weights")
    assert read.keys() == named.keys()
    for name, tensor in named.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_each_tensor_begins_at_a_multiple_of_its_size(tmp_path):
    named = [("a", torch.ones(3, dtype=torch.int8)), ("b", torch.ones(3, dtype=torch.float64)), ("c", torch.ones(5))]
    write_tensors(named, tmp_path / "weights")
    data = (tmp_path / "weights").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in named)
    assert len(data) == 8 + length + 3 + 24 + 20
