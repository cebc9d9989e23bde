"""Rows that can't be trained as they were recorded, which one look at their numbers tells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.schemas.records import TrainSample


def record_problems(batch: Sequence[TrainSample]) -> dict[str, str]:
    """Return by episode id why it can't be trained: one number that is not finite would make the whole step's so."""
    found: dict[str, str] = {}
    for sample in batch:
        columns = {
            "log-probability": sample.logprobs,
            "advantage": sample.advantages,
            "temperature": sample.temperatures,
        }
        for name, column in columns.items():
            odd = sample.loss_mask & ~np.isfinite(column)
            if odd.any() and sample.episode_id not in found:
                found[sample.episode_id] = f"the {name} of the token at {int(np.argmax(odd))} is not finite"
    return found
