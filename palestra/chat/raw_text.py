"""Text that a caller has laid out himself, as ids: control tokens in it are meant."""

from __future__ import annotations

from typing import Any

import numpy as np

from palestra.chat.rendering import Renderer
from palestra.schemas.records import Ids


def encode_text(renderer: Renderer, text: str) -> Ids:
    """[P], with what the tokenizer puts in front of every text, if it does."""
    text = text.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates
    return np.asarray(_tokenizer(renderer).encode(text), np.int32)


def vocabulary_size(renderer: Renderer) -> int:
    """Ids from this one on are no tokens."""
    tokenizer = _tokenizer(renderer)
    return len(tokenizer) if hasattr(tokenizer, "__len__") else int(tokenizer.vocab_size)


def _tokenizer(renderer: Renderer) -> Any:
    return renderer._tokenizer  # type: ignore[attr-defined]  # ours and each of the package have it
