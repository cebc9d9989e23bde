"""Rows that can't be trained as they were recorded, which one look at their numbers tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.schemas.records import Floats, TrainSample


def record_problems(batch: Sequence[TrainSample]) -> dict[str, str]:
    """Return by episode id why it can't be trained: what was recorded at sampling is not finite."""
    return not_finite(
        batch, [{"log-probability": sample.logprobs, "temperature": sample.temperatures} for sample in batch]
    )


def not_finite(batch: Sequence[TrainSample], columns: Sequence[Mapping[str, Floats]]) -> dict[str, str]:
    """Return by episode id why it can't be trained: one such number would make the whole step's gradient NaN.

    Args:
        batch: S rows.
        columns: for each row its [N] columns to look at, by what a column is called.
    """
    found: dict[str, str] = {}
    for sample, named in zip(batch, columns, strict=True):
        for name, column in named.items():
            odd = sample.loss_mask & ~np.isfinite(column)
            if odd.any() and sample.episode_id not in found:
                found[sample.episode_id] = f"the {name} of the token at {int(np.argmax(odd))} is not finite"
    return found
