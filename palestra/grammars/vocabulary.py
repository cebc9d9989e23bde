"""A model's tokenizer as grammar processes need it."""

from __future__ import annotations

from copy import copy
from typing import Any

from palestra.grammars.process import GrammarVocabulary


def vocabulary_of(tokenizer: Any, vocab_size: int) -> GrammarVocabulary:
    """Return the vocabulary that grammar processes need, made from a tokenizer.

    Args:
        vocab_size: number of tokens of the model, which may be larger than the tokenizer's.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return GrammarVocabulary(tokenizer=backend.to_str(), size=vocab_size, eos=tokenizer.eos_token_id)
