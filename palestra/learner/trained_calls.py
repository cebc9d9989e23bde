"""The logprobs of sampled tokens at a step's first gradients, by call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from palestra.store.trained_tokens import TrainedCall
from palestra.types.calls import Floats
from palestra.types.records import TrainSample

Row = tuple[TrainSample, Floats]  # a row, and the logprobs [N] of its trained tokens under the weights of its gradient


def trained_calls(rows: Iterable[Row]) -> list[TrainedCall]:
    """Return the trained tokens of rows by call.

    Rows trained on unsampled tokens are left out: their logprobs are not of sampled tokens.
    """
    found: dict[tuple[str, int], list[tuple[int, Floats]]] = {}
    for row, logprobs in rows:
        if row.targets is not None:
            continue
        places = np.flatnonzero(row.loss_mask)
        calls = row.calls[places]
        for index in np.unique(calls).tolist():
            # A row is a path from the root, so a place in the row is the same place in the call's prompt and reply.
            own = places[calls == index]
            start, stop = int(own[0]), int(own[-1]) + 1
            values = np.where(
                row.loss_mask[start:stop] & (row.calls[start:stop] == index), logprobs[start:stop], np.nan
            )
            found.setdefault((row.episode_id, index), []).append((start, values.astype(np.float32)))
    return [_joined(name, index, parts) for (name, index), parts in found.items()]


def _joined(episode_id: str, index: int, parts: Sequence[tuple[int, Floats]]) -> TrainedCall:
    """Return a call of several parts: two rows train a reply where a later prompt has only its beginning."""
    start = min(place for place, _ in parts)
    values = np.full(max(place + len(part) for place, part in parts) - start, np.nan, np.float32)
    for place, part in parts:
        here = values[place - start : place - start + len(part)]
        here[:] = np.where(np.isnan(part), here, part)
    return TrainedCall(episode_id=episode_id, index=index, start=start, logprobs=values)
