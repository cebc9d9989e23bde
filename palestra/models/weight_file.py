"""The weights of a policy in a file, for engines in processes of their own on the same machine.

The file is in the format of safetensors, in a folder of shared memory where the machine has one, so that it is written
and read at the speed of memory.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
from safetensors import SafetensorError

from palestra.errors import ModelError
from palestra.models.weights import WeightSource

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
_PIECE = 2**20  # numbers that are rounded and written at a time
_KINDS = {  # what safetensors calls a type of torch
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def weight_folder() -> Path:
    """Return the folder for weight files: shared memory, or temporary files where the machine has none."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def write_weights(source: WeightSource, path: Path, dtype: torch.dtype | None = None) -> FileWeights:
    """Write weights into a file, and return what reads them there. A file of this name is replaced as a whole.

    They are rounded and written piece by piece: a copy of all of them would take as much memory as the file, and twice
    the time.

    Args:
        source: the weights; it may change once this has returned.
        path: of the file.
        dtype: precision of what is written; None: of each tensor as it is.

    Raises:
        OSError: the file can't be written; a part of it is not left behind.
    """
    import torch  # here alone: a process that only names such files loads none

    named = [(name, tensor.detach()) for name, tensor in source.tensors()]
    named.sort(key=lambda pair: -(dtype or pair[1].dtype).itemsize)  # so that each begins at a multiple of its size
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(_header(named, dtype))
            for _, tensor in named:
                for piece in torch.split(tensor.reshape(-1), _PIECE):
                    file.write(piece.to("cpu", dtype).view(torch.uint8).numpy().data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return FileWeights(path)


def _header(named: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> bytes:
    """Return how a file begins: the length of a description, and the description, padded to a multiple of 8 bytes.

    Source: https://github.com/huggingface/safetensors#format

    Args:
        named: [n, d] or [d], in the order of the file.
        dtype: precision of what is written; None: of each tensor as it is.
    """
    found: dict[str, Any] = {}
    at = 0
    for name, tensor in named:
        kind = dtype or tensor.dtype
        size = tensor.numel() * kind.itemsize
        found[name] = {
            "dtype": _KINDS[str(kind).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    description = json.dumps(found).encode()
    description += b" " * (-len(description) % 8)
    return len(description).to_bytes(8, "little") + description


@dataclass(frozen=True, slots=True)
class FileWeights:
    """Weights in a file that `write_weights` made.

    Attributes:
        path: of the file.
    """

    path: Path

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, [n, d] or [d], each mapped from the file. See `WeightSource`.

        Raises:
            ModelError: there is no such file, or it is damaged.
        """
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - an object of Rust, over which one can't iterate
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"weights can't be read from {self.path}: {error}") from error
