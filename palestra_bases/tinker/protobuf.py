"""The protobuf messages of the Tinker API, and the arrays in them.

Messages are declared here, field by field, as `name number type`, with the numbers of the wire. All arrays are raw
little-endian bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from palestra.errors import InvalidRequest

CONTENT_TYPE = "application/x-protobuf"
_PACKAGE = "palestra_bases.tinker"
_OPTIONAL, _REPEATED = 1, 3
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_MESSAGE, _ENUM_NUMBER = 11, 5  # enumerations are read as numbers, whose encoding is the same
# Each message with its fields: name, number, type. `*` is repeated, `map:` is a map from strings, `|NAME` is a member
# of the choice NAME, of which one field is set.
_MESSAGES: dict[str, str] = {
    "Text": "tokens 1 bytes",
    "Image": "data 1 bytes; format 2 string; expected_tokens 3 int32",
    "Audio": "dmel 1 bytes",
    "Chunk": "encoded_text 1 Text|chunk; image 2 Image|chunk; dmel 3 Audio|chunk",
    "Sparse": "values 1 bytes; crow_indices 2 bytes; col_indices 3 bytes",
    "Tensor": "dense 1 bytes|values; sparse_csr 2 Sparse|values; dtype 3 enum; shape 4 int64*",
    "Span": "sequence_id 1 string; offset 2 int64; length 3 int64",
    "Provenance": "prompt_tokens 1 Span|span; sampled_tokens 2 Span|span",
    "Datum": "model_input 1 Chunk*; loss_fn_inputs 2 map:Tensor; model_input_spans 3 Provenance*; "
    "loss_fn_input_spans 4 Provenance*",
    "LossValue": "number 1 double|value; text 2 string|value",
    "ForwardBackwardRequest": "model_id 1 string; seq_id 2 int32; data 3 Datum*; loss_fn 4 string; "
    "loss_fn_config 5 map:double; forward_only 6 bool; loss_fn_config_v2 7 map:LossValue",
    "BatchedTensor": "data 1 bytes; offsets 2 bytes; dtype 3 enum; trailing_shape 4 int64*",
    "ArrayRecord": "type_tag 1 string; fields 2 map:BatchedTensor; num_datums 3 int64",
    "ForwardBackwardOutput": "loss_fn_output_type 1 string; loss_fn_outputs 2 ArrayRecord*; metrics 3 map:double",
    "TopkLogprobs": "token_ids 1 bytes; logprobs 2 bytes; k 3 int32; length 4 int32",
    "SampledSequence": "stop_reason 1 enum; tokens 2 bytes; logprobs 3 bytes; topk_sampled_logprobs 4 TopkLogprobs",
    "SampleResponse": "sequences 1 SampledSequence*; prompt_logprobs 2 bytes; topk_prompt_logprobs 3 TopkLogprobs; "
    "prompt_cache_hit_tokens 4 int32",
}
FLOAT32, INT64 = 1, 2  # of `dtype`; requests have no others
STOP, LENGTH = 0, 1  # of `stop_reason`
_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
DTYPE_NAMES = {FLOAT32: "float32", INT64: "int64"}


def _fields(message: Any, text: str) -> Iterator[tuple[Any, str, str]]:
    """Yield each declared field, as a new field of `message`, its type, and its oneof."""
    for part in text.split(";"):
        name, number, kind = part.split()
        kind, _, choice = kind.partition("|")
        yield message.field.add(name=name, number=int(number), label=_OPTIONAL), kind, choice


def _set_type(field: Any, kind: str) -> None:
    """Give a field the type `kind`: a scalar, an enumeration, or a message of this file."""
    if kind == "enum":
        field.type = _ENUM_NUMBER
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{kind}"


def _declare() -> Mapping[str, Any]:
    """Return a class for each message, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="palestra_bases/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, text in _MESSAGES.items():
        message: Any = file.message_type.add(name=name)
        choices: list[str] = []
        for field, kind, choice in _fields(message, text):
            if choice:
                if choice not in choices:
                    choices.append(choice)
                    message.oneof_decl.add(name=choice)
                field.oneof_index = choices.index(choice)
            if kind.startswith("map:"):
                entry = message.nested_type.add(name="".join(p.title() for p in field.name.split("_")) + "Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=_OPTIONAL, type=_SCALARS["string"])
                _set_type(entry.field.add(name="value", number=2, label=_OPTIONAL), kind.removeprefix("map:"))
                field.label, field.type = _REPEATED, _MESSAGE
                field.type_name = f".{_PACKAGE}.{name}.{entry.name}"
            else:
                field.label = _REPEATED if kind.endswith("*") else _OPTIONAL
                _set_type(field, kind.removesuffix("*"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _declare()


def new(name: str, **fields: Any) -> Any:
    """Return a new message of this file by name, such as `SampleResponse`."""
    return _CLASSES[name](**fields)


def parse(name: str, body: bytes) -> Any:
    """Parse a message by name, such as `ForwardBackwardRequest`."""
    try:
        return _CLASSES[name].FromString(body)
    except (DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is no protobuf message {name}: {error}") from None


def array_of(tensor: Any, name: str, most: int) -> NDArray[Any]:
    """Return a request's tensor, float32 or int64 in its shape; without a shape [N].

    Args:
        tensor: a message `Tensor`; entries missing from a sparse one (compressed rows, [N, K]) are 0.
        most: limit of a sparse tensor's numbers, because its shape can be larger than its message.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{name} has the dtype number {tensor.dtype}, which is neither float32 nor int64", name)
    if tensor.WhichOneof("values") == "sparse_csr":
        return _densified(tensor, dtype, name, most)
    shape = tuple(tensor.shape) or (len(tensor.dense) // dtype.itemsize,)
    wanted = dtype.itemsize
    for size in shape:
        wanted *= size  # of Python's own integers, which do not overflow
    if min(shape) < 0 or wanted != len(tensor.dense):
        raise InvalidRequest(
            f"{name} has the shape {list(shape)} and the dtype {DTYPE_NAMES[tensor.dtype]}, which are {wanted} bytes, "
            f"and there are {len(tensor.dense)}",
            name,
        )
    found: NDArray[Any] = np.frombuffer(tensor.dense, dtype).reshape(shape)
    return found


def _densified(tensor: Any, dtype: np.dtype[Any], name: str, most: int) -> NDArray[Any]:
    """Return a sparse tensor of compressed rows as a dense one, [N, K]."""
    shape, sparse = list(tensor.shape), tensor.sparse_csr
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > most:
        raise InvalidRequest(
            f"{name} is sparse and has the shape {shape}; a sparse tensor has two dimensions and at most {most:,} "
            "numbers",
            name,
        )
    try:
        values = np.frombuffer(sparse.values, dtype)
        ends, columns = np.frombuffer(sparse.crow_indices, "<i8"), np.frombuffer(sparse.col_indices, "<i8")
    except ValueError as error:
        raise InvalidRequest(f"{name} is sparse, and its values or indices are cut: {error}", name) from None
    # The largest end is the last one, and is checked, before anything of that size is made.
    fits = len(ends) == shape[0] + 1 and ends[0] == 0 and ends[-1] == len(columns) == len(values)
    if not fits or (np.diff(ends) < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
        raise InvalidRequest(f"{name} is sparse, and its indices do not fit its shape {shape}", name)
    found: NDArray[Any] = np.zeros(shape, dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(ends)), columns] = values
    return found


def batched(arrays: Sequence[NDArray[np.float32]]) -> Any:
    """Return a `BatchedTensor` of one float32 [N] or [N, K] for each datum, all with the same K."""
    ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
    return new(
        "BatchedTensor",
        data=b"".join(array.astype("<f4").tobytes() for array in arrays),
        offsets=ends.tobytes(),
        dtype=FLOAT32,
        trailing_shape=arrays[0].shape[1:] if arrays else (),
    )
