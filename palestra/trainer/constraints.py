"""Recomputes which tokens a constrained reply could have had at each position, by walking its grammar."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.errors import ConfigError, InvalidRequest
from palestra.grammars.pool import Grammars
from palestra.types.calls import GrammarSpan
from palestra.types.records import TrainSample

_MOST_WALKED = 2**16  # tokens of replies that are walked to find all choices of a grammar
_MOST_BYTES = 64 * 2**20  # of masks that are kept


class GrammarMasks:
    """A cache of token masks of walked replies: every epoch and every network needs the same ones."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._kept: OrderedDict[tuple[str, tuple[int, ...], tuple[int, ...]], NDArray[np.int32]] = OrderedDict()
        self._bytes = 0

    def of(self, grammar: str, tokens: Sequence[int], wanted: Sequence[int]) -> NDArray[np.int32]:
        """Return the token masks at the positions `wanted` of a reply, int32 [W, B]; see `Grammars.walk`."""
        key = (grammar, tuple(tokens), tuple(wanted))
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        found = self._kept[key] = self._grammars.walk(grammar, tokens, wanted)
        self._bytes += found.nbytes
        while self._bytes > _MOST_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found


def allowed_tokens(samples: Sequence[tuple[TrainSample, Any, Any]], masks: GrammarMasks, vocab: int) -> Tensor | None:
    """Return a mask of the tokens that could have been sampled at each trained token; None: all tokens, everywhere.

    Without the mask, the loss would compare the policy's unconstrained probability with the constrained probability
    under which the token was sampled. `samples` are rows with their offset and path, as in `MicroBatch`.
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
            walked = masks.of(span.grammar, tokens, wanted)[:, :width]
            bits[torch.from_numpy(places)] = torch.from_numpy(walked)
        parts.append(bits)
    return torch.cat(parts)


def choices_of(grammar: str, max_tokens: int, most: int, grammars: Grammars, eos: int) -> tuple[tuple[int, ...], ...]:
    """Return every reply that can be sampled under a grammar, in order of the token ids.

    One text may have several tokenizations, which are different replies. Raises InvalidRequest, GrammarRefused,
    EngineFailure: see `Grammars.walk`.
    """
    found: list[tuple[int, ...]] = []
    open_replies: list[tuple[int, ...]] = [()]
    walked = 0
    while open_replies:
        reply = open_replies.pop()
        if len(reply) == max_tokens or reply[-1:] == (eos,):
            found.append(reply)
            continue
        walked += len(reply)
        if walked > _MOST_WALKED:
            raise ConfigError("the replies that the grammar of a call lets be sampled are too long to find all of them")
        following = np.flatnonzero(np.unpackbits(grammars.following(grammar, reply).view(np.uint8), bitorder="little"))
        if len(found) + len(open_replies) + len(following) > most:
            raise ConfigError(f"the grammar of a call lets more than {most} replies be sampled")
        open_replies += [(*reply, int(token)) for token in reversed(following)]
    return tuple(found)


def grammar_problem(sample: TrainSample, grammars: Grammars) -> str | None:
    """Return why a row cannot be walked through its grammars; None: it can."""
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
