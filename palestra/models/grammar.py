"""Replies that have to match a grammar: which tokens may come next. Grammars are compiled by `llguidance`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from palestra.errors import InvalidRequest

MOST_COMPILED = 256  # grammars of one tokenizer that are kept: compiling takes a thousand times as long as copying


class Grammars:
    """Makes matchers for one tokenizer; `llguidance` is imported, and the tokenizer prepared, at the first."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`tokenizer` is a fast tokenizer of transformers; `vocab_size` is the model's, which may be larger."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._prepared: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # at their beginning; the one used last comes last

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a reply.

        Raises:
            InvalidRequest: `grammar` can't be compiled.
        """
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        if self._prepared is None:
            self._prepared = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size)
        found = self._compiled.pop(grammar, None)
        if found is None:
            found = LLMatcher(self._prepared, grammar)
            if found.is_error():
                raise InvalidRequest(f"the grammar can't be used: {found.get_error()}", "response_format")
        self._compiled[grammar] = found
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)
        return Matcher(found.deep_copy(), self._vocab_size)


def unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """[…, ceil(V / 32)] int32 to [..., V] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)[..., :vocab_size]


class Matcher:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = torch.zeros((1, (vocab_size + 31) // 32), dtype=torch.int32)

    def bits(self) -> Tensor:
        """[ceil(V / 32)] int32, a bit for each token that may come next; the stop token's where the reply may end."""
        from llguidance.torch import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        return self._bits[0].clone()

    def accept(self, token: int) -> None:
        """Go on with a token.

        Raises:
            ValueError: the grammar does not have it there.
        """
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} does not fit the grammar: {self._matcher.get_error()}")
