"""Find out again which tokens a constrained reply could have had at each place, by walking its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.errors import InvalidRequest
from palestra.grammars.pool import Grammars
from palestra.types.calls import GrammarSpan
from palestra.types.records import TrainSample


def allowed_tokens(samples: Sequence[tuple[TrainSample, Any, Any]], grammars: Grammars, vocab: int) -> Tensor | None:
    """Return a mask of the tokens that could have been sampled at each trained token; None: all tokens, everywhere.

    Without the mask the loss would compare the policy's unconstrained probability with the constrained one with which
    the token was sampled.

    Args:
        samples: rows of a micro-batch, each with its offset and path (see `MicroBatch`).
        grammars: walks the grammars.
        vocab: number of the model's tokens, V.

    Returns:
        int32 [T, B], B = ceil(V / 32), a bit for each token; T counts the trained tokens of the rows, in order.

    Raises:
        InvalidRequest, GrammarRefused, EngineFailure: see `Grammars.walk`.
    """
    if not any(sample.grammars for sample, _, _ in samples):
        return None
    width = (vocab + 31) // 32
    parts = []
    for sample, _, _ in samples:
        trained = np.flatnonzero(sample.loss_mask)
        bits = torch.full((len(trained), width), -1, dtype=torch.int32)
        for span in sample.grammars:
            tokens, wanted = _walk_of(sample, span)
            places = np.searchsorted(trained, np.array(wanted, np.int64) + span.start)
            # A tokenizer may know more tokens than the model has, such as SmolLM2's; those are never sampled.
            walked = grammars.walk(span.grammar, tokens, wanted)[:, :width]
            bits[torch.from_numpy(places)] = torch.from_numpy(walked)
        parts.append(bits)
    return torch.cat(parts)


def grammar_problem(sample: TrainSample, grammars: Grammars) -> str | None:
    """Return why a row can't be walked through its grammars; None: it can.

    Raises:
        EngineFailure: the grammar processes do not work.
    """
    for span in sample.grammars:
        tokens, wanted = _walk_of(sample, span)
        try:
            grammars.walk(span.grammar, tokens, wanted, keep=False)
        except InvalidRequest as error:
            return f"the reply at token {span.start} can't be walked through its grammar: {error}"
    return None


def _walk_of(sample: TrainSample, span: GrammarSpan) -> tuple[list[int], list[int]]:
    """Return the tokens of a span, and the indices in it of the trained ones."""
    stop = span.start + span.tokens
    return sample.ids[span.start : stop].tolist(), np.flatnonzero(sample.loss_mask[span.start : stop]).tolist()
