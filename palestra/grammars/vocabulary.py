"""A model's tokenizer as grammars need it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarVocabulary:
    """The tokens to which the bits of a mask belong.

    Attributes:
        tokenizer: a fast tokenizer, as the JSON of its `tokenizer.json`.
        size: number of tokens of the model, V; it may be larger than the tokenizer's.
        eos: the token that ends a reply; None: there is none.
    """

    tokenizer: str
    size: int
    eos: int | None


def vocabulary_of(tokenizer: Any, vocab_size: int) -> GrammarVocabulary:
    """Return the vocabulary that grammars need, made from a tokenizer.

    Args:
        vocab_size: number of tokens of the model, which may be larger than the tokenizer's.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return GrammarVocabulary(tokenizer=backend.to_str(), size=vocab_size, eos=tokenizer.eos_token_id)
