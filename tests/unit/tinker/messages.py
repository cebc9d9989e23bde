"""Messages of the Tinker API as a client writes them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palestra_bases.tinker.protobuf import FLOAT32, INT64, new


def tensor(values: Sequence[Any] | np.ndarray, kind: str = "float32", shape: Sequence[int] | None = None) -> Any:
    """A dense tensor, float32 or int64."""
    array = np.asarray(values, "<f4" if kind == "float32" else "<i8")
    dtype = FLOAT32 if kind == "float32" else INT64
    return new("Tensor", dense=array.tobytes(), dtype=dtype, shape=array.shape if shape is None else shape)


def datum(tokens: Sequence[int], targets: Sequence[int], **inputs: Sequence[float]) -> Any:
    """A datum of text, with its targets and other inputs."""
    text = new("Text", tokens=np.asarray(tokens, "<i4").tobytes())
    given = {"target_tokens": tensor(targets, "int64")} | {name: tensor(values) for name, values in inputs.items()}
    return new("Datum", model_input=[new("Chunk", encoded_text=text)], loss_fn_inputs=given)


def batch_message(
    data: Sequence[Any], loss: str = "cross_entropy", config: Mapping[str, float] | None = None, **fields: Any
) -> Any:
    """A message `ForwardBackwardRequest`."""
    return new("ForwardBackwardRequest", data=data, loss_fn=loss, loss_fn_config=config or {}, **fields)


def logprobs_of(output: Any) -> list[np.ndarray]:
    """The logprobs of each datum in a message `ForwardBackwardOutput`."""
    (record,) = output.loss_fn_outputs
    field = record.fields["logprobs"]
    ends = np.frombuffer(field.offsets, "<i8")
    return [np.frombuffer(field.data[a:b], "<f4") for a, b in itertools.pairwise(ends)]
