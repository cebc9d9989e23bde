"""Converts the datums of `forward_backward` to rows of a trainer, and a trainer's results back.

Position i of a datum's input predicts its target i, which may be any token. A row of a trainer predicts its own tokens
from earlier ones, so a datum of N tokens becomes a row of N + 1, with explicit targets. A datum with K targets per
position, for a student that learns a teacher's K likeliest tokens, becomes K rows of the same tokens, which the trainer
merges. Nothing is normalised: the weight of each position is 1, or the datum's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.algorithms.loss import Loss, LossInputs, LossSpec
from palestra.algorithms.losses import build_loss
from palestra.errors import ConfigError, InvalidRequest
from palestra.types.calls import Floats, Ids
from palestra.types.records import TrainSample
from palestra_bases.tinker.protobuf import DTYPE_NAMES, array_of, batched, new
from palestra_bases.tinker.records import TinkerLimits

_ADVANTAGES = ("target_tokens", "logprobs", "advantages")
LOSS_INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": _ADVANTAGES,
    "ppo": _ADVANTAGES,
    "cispo": _ADVANTAGES,
    "dro": _ADVANTAGES,
    "gspo": (*_ADVANTAGES, "sequence_ratio_mask"),
}
"""The losses of the API, each with the inputs that every datum has to have."""
_READS_LOGPROBS_EVERYWHERE = ("dro", "gspo")  # whose loss depends on them where the advantage is 0
_NUMBERS = {"target_tokens": "int64"}  # all other inputs are float32


@dataclass(frozen=True, kw_only=True, slots=True)
class DatumBatch:
    """The rows and the loss of one request.

    Attributes:
        rows: S x K rows: those of the first datum, then those of the second, and so on.
        several: K, if targets are [N, K]; None: they are [N], and K is 1.
    """

    rows: tuple[TrainSample, ...]
    loss: LossSpec
    several: int | None = None


def read_batch(request: Any, vocab_size: int, max_tokens: int, limits: TinkerLimits) -> DatumBatch:
    """Return the rows and the loss of a message `ForwardBackwardRequest`."""
    name = request.loss_fn
    if name not in LOSS_INPUTS:
        raise InvalidRequest(f"there is no loss {name!r} here; there are {', '.join(LOSS_INPUTS)}", "loss_fn")
    if not 0 < len(request.data) <= limits.datums:
        raise InvalidRequest(f"a request has 1 to {limits.datums} datums, and this one {len(request.data)}", "data")
    loss = _loss_of(name, _config_of(request))
    rows, several, left = list[TrainSample](), None, limits.targets
    for number, datum in enumerate(request.data):
        place = f"data.{number}"
        tokens = _checked_tokens(datum, place, vocab_size, max_tokens)
        inputs = _inputs(datum, place, name, len(tokens), left)
        targets = inputs["target_tokens"]
        _check_tokens(targets, f"{place}.loss_fn_inputs.target_tokens", vocab_size)
        mine = targets.shape[1] if targets.ndim == 2 else None
        if number == 0:
            several = mine
        elif mine != several:
            raise InvalidRequest(
                f"{place}.loss_fn_inputs.target_tokens has the shape {list(targets.shape)}, and data.0 has "
                f"{several or 1} for each token; all datums of a request have equally many",
                place,
            )
        if mine is None:
            rows.append(_row(place, name, tokens, inputs))
        else:
            left -= targets.size
            for column in range(mine):
                of_column = {key: np.ascontiguousarray(value[:, column]) for key, value in inputs.items()}
                rows.append(_row(place, name, tokens, of_column))
    return DatumBatch(rows=tuple(rows), loss=loss, several=several)


def _config_of(request: Any) -> dict[str, float]:
    found = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidRequest(f"loss_fn_config.{key} is a text, and has to be a number", f"loss_fn_config.{key}")
        found[key] = value.number
    return found


def _loss_of(name: str, parameters: Mapping[str, float]) -> LossSpec:
    for key, value in parameters.items():
        if not np.isfinite(value):
            raise InvalidRequest(f"loss_fn_config.{key} is {value}, and has to be finite", f"loss_fn_config.{key}")
    spec = LossSpec(name=name, parameters=dict(parameters))
    try:
        build_loss(spec)
    except ConfigError as error:
        raise InvalidRequest(str(error), "loss_fn_config") from None
    return spec


def _checked_tokens(datum: Any, place: str, vocab_size: int, max_tokens: int) -> Ids:
    """Return the tokens of a datum's input, int32 [N]."""
    tokens = _tokens(datum, place)
    if not 0 < len(tokens) <= max_tokens:
        raise InvalidRequest(f"{place}.model_input has {len(tokens)} tokens, and a datum has 1 to {max_tokens}", place)
    _check_tokens(tokens, f"{place}.model_input", vocab_size)
    return tokens


def _row(place: str, loss: str, tokens: Ids, inputs: Mapping[str, NDArray[Any]]) -> TrainSample:
    length, targets = len(tokens), inputs["target_tokens"]
    ones, zeros = np.ones(length, np.float32), np.zeros(length, np.float32)
    advantages = inputs.get("advantages", zeros)
    logprobs = inputs.get("logprobs", np.full(length, np.nan, np.float32))
    if "advantages" in inputs and loss not in _READS_LOGPROBS_EVERYWHERE:
        # A ratio that overflows times an advantage of 0 would not be a number; with this it is 0, as in the formula.
        logprobs = np.where(advantages == 0.0, np.float32(0.0), logprobs)
    if (counted := inputs.get("sequence_ratio_mask")) is not None:
        logprobs = np.where(counted == 1.0, logprobs, np.float32(np.nan))  # no logprob, so not in the sequence's ratio
    return TrainSample(
        episode_id=place,
        policy="",
        ids=_behind(tokens, tokens[-1:]),  # the last one is not read by any position that has a target
        targets=np.concatenate((targets[:1], targets)).astype(np.int32),
        loss_mask=np.concatenate(([False], ones.astype(np.bool_))),
        logprobs=_shifted(logprobs),
        versions=np.full((length + 1, 2), -1, np.int32),
        calls=np.full(length + 1, -1, np.int32),
        advantages=_shifted(advantages),
        loss_weights=_shifted(inputs.get("weights", ones)),
        temperatures=np.ones(length + 1, np.float32),
    )


def _tokens(datum: Any, place: str) -> Ids:
    """Return the tokens of a datum's input, int32 [N]."""
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise InvalidRequest(f"{place}.model_input has a chunk {kind}; models here read text (int32 tokens)", place)
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)


def _inputs(datum: Any, place: str, loss: str, length: int, most: int) -> dict[str, NDArray[Any]]:
    wanted, found = LOSS_INPUTS[loss], dict[str, NDArray[Any]]()
    given = datum.loss_fn_inputs
    if set(given) != set(wanted) and not (loss == "cross_entropy" and set(given) == {"target_tokens"}):
        raise InvalidRequest(
            f"{place}.loss_fn_inputs of {loss} are {', '.join(wanted)}, and not {', '.join(sorted(given)) or 'none'}",
            f"{place}.loss_fn_inputs",
        )
    wide = tuple(given["target_tokens"].shape) if loss == "cross_entropy" else ()
    if len(wide) == 2 and not 0 < wide[0] * wide[1] <= most:
        raise InvalidRequest(
            f"{place}.loss_fn_inputs.target_tokens has the shape {list(wide)}, and this request may have {most:,} more "
            "targets; send fewer datums at a time",
            place,
        )
    shape = (length, wide[1]) if len(wide) == 2 else (length,)
    for name, tensor in given.items():
        where = f"{place}.loss_fn_inputs.{name}"
        array, dtype = array_of(tensor, where, most), _NUMBERS.get(name, "float32")
        if DTYPE_NAMES[tensor.dtype] != dtype or array.shape != shape:
            each = "one" if len(shape) == 1 else f"{shape[1]}"
            raise InvalidRequest(
                f"{where} has the dtype {DTYPE_NAMES[tensor.dtype]} and the shape {list(array.shape)}; {loss} takes "
                f"{dtype} {list(shape)}, {each} for each token of model_input",
                where,
            )
        if dtype == "float32" and not np.isfinite(array).all():
            first = tuple(int(place[0]) for place in np.nonzero(~np.isfinite(array)))
            at = first[0] if len(first) == 1 else list(first)
            raise InvalidRequest(f"{where} is {array[first]} at position {at}, and has to be finite", where)
        found[name] = array
    if (mask := found.get("sequence_ratio_mask")) is not None:
        where = f"{place}.loss_fn_inputs.sequence_ratio_mask"
        if not np.isin(mask, (0.0, 1.0)).all():
            raise InvalidRequest(f"{where} has numbers other than 0 and 1", where)
        if not mask.any() and found["advantages"].any():
            raise InvalidRequest(f"{where} is 0 everywhere, so that the sequence has no ratio", where)
    return found


def _check_tokens(tokens: NDArray[Any], place: str, vocab_size: int) -> None:
    """Raise InvalidRequest unless all ids, [N] or [N, K], are tokens of the model."""
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise InvalidRequest(f"{place} has the token {int(outside[0])}; the model's are 0 to {vocab_size - 1}", place)


def _behind(first: NDArray[Any], last: NDArray[Any]) -> Ids:
    """Return int32 [N + M] of ids [N] followed by ids [M]."""
    return np.concatenate((first, last)).astype(np.int32)


def _shifted(numbers: NDArray[Any]) -> Floats:
    """Return float32 [N + 1] of a datum's [N] numbers: the first token of a row is not predicted."""
    return np.concatenate((np.zeros(1, np.float32), numbers)).astype(np.float32)


def loss_without_gradient(batch: DatumBatch, logprobs: Sequence[Floats]) -> float:
    """Return the summed loss of a batch by logprobs without a gradient, float32 [N + 1] of each row."""
    import torch

    def column(values: Sequence[NDArray[Any]]) -> torch.Tensor:
        """Return [T] numbers of all rows, [N + 1] each, without their first tokens."""
        return torch.from_numpy(np.concatenate([value[1:] for value in values]))

    rows, loss = batch.rows, build_loss(batch.loss)
    inputs = LossInputs(
        logprobs=column(logprobs),
        sampling_logprobs=column([row.logprobs for row in rows]),
        old_logprobs=None,
        advantages=column([row.advantages for row in rows]),
        on_policy=torch.zeros(sum(len(row.ids) - 1 for row in rows), dtype=torch.bool),
    )
    assert isinstance(loss, Loss)
    if loss.over_sequences:
        each = torch.split(loss.of_sequence(inputs), [len(row.ids) - 1 for row in rows])
        means = torch.cat([one.nanmean().nan_to_num().expand(len(one)) for one in each])
        inputs = replace(inputs, sequence_means=means)
    losses = loss(inputs).loss
    return float((losses * column([row.loss_weights for row in rows])).sum())


def output_of(batch: DatumBatch, logprobs: Sequence[Floats], loss: float) -> bytes:
    """Return the message `ForwardBackwardOutput` of a batch. `logprobs`: float32 [N + 1], whose first is unused."""
    arrays = [row[1:] for row in logprobs]
    if (several := batch.several) is not None:
        arrays = [np.stack(arrays[first : first + several], axis=1) for first in range(0, len(arrays), several)]
    record = new("ArrayRecord", num_datums=len(arrays), fields={"logprobs": batched(arrays)})
    # A client refuses a metric whose name does not end with how those of several requests are added up.
    metrics = {"loss:sum": loss, "tokens:sum": float(sum(map(len, arrays)))}
    message = new("ForwardBackwardOutput", loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
    encoded: bytes = message.SerializeToString()
    return encoded
