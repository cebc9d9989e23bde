"""Find rows that can't be trained as they were recorded, from their numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.types.calls import Floats
from palestra.types.records import TrainSample


def record_problems(batch: Sequence[TrainSample]) -> dict[str, str]:
    """Return episodes with a number recorded at sampling that is not finite: ids and reasons.

    Args:
        batch: S rows of sampled tokens.
    """
    return not_finite(
        batch, [{"log-probability": sample.logprobs, "temperature": sample.temperatures} for sample in batch]
    )


def not_finite(batch: Sequence[TrainSample], columns: Sequence[Mapping[str, Floats]]) -> dict[str, str]:
    """Return episodes with a number that is not finite: ids and reasons.

    One such number would make the gradient of the whole step NaN.

    Args:
        columns: for each row its columns to check, float32 [N], by the name for the message.
    """
    found: dict[str, str] = {}
    for sample, named in zip(batch, columns, strict=True):
        for name, column in named.items():
            odd = sample.loss_mask & ~np.isfinite(column)
            if odd.any() and sample.episode_id not in found:
                found[sample.episode_id] = f"the {name} of the token at {int(np.argmax(odd))} is not finite"
    return found
