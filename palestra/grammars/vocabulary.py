"""A model's tokenizer as grammars need it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarVocabulary:
    """The tokens of a mask's bits.

    Attributes:
        tokenizer: a fast tokenizer, as the JSON of its `tokenizer.json`.
        size: tokens of the model, V; may exceed the tokenizer's.
        eos: the token that ends a reply, if any.
    """

    tokenizer: str
    size: int
    eos: int | None


def vocabulary_of(tokenizer: Any, vocab_size: int) -> GrammarVocabulary:
    """Return the vocabulary for grammars from a tokenizer. `vocab_size` is the model's, which may exceed the
    tokenizer's.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return GrammarVocabulary(tokenizer=backend.to_str(), size=vocab_size, eos=tokenizer.eos_token_id)
