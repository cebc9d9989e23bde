"""Which tokens a constrained reply could have had at each place, found again by going through its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.models.grammar import Grammars
from palestra.schemas.records import TrainSample


def allowed_tokens(samples: Sequence[tuple[TrainSample, Any, Any]], grammars: Grammars, vocab: int) -> Tensor | None:
    """[T, ceil(V / 32)] int32, a bit for each token that could have been sampled; None: all, everywhere.

    T counts the trained tokens of the samples, in order. Without it the ratio of a constrained token would compare the
    policy's unconstrained probability with the constrained one that it was sampled with.
    """
    if not any(sample.grammars for sample, _, _ in samples):
        return None
    width = (vocab + 31) // 32
    parts = []
    for sample, _, _ in samples:
        trained = np.flatnonzero(sample.loss_mask)
        bits = torch.full((len(trained), width), -1, dtype=torch.int32)
        place = {int(position): number for number, position in enumerate(trained)}
        for span in sample.grammars:
            matcher = grammars.matcher(span.grammar)
            for position in range(span.start, span.start + span.tokens):
                if position in place:
                    bits[place[position]] = matcher.bits()
                matcher.accept(int(sample.ids[position]))
        parts.append(bits)
    return torch.cat(parts)
