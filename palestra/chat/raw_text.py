"""Text that a caller has laid out himself, as ids: control tokens in it are meant."""

from __future__ import annotations

from typing import Any

import numpy as np

from palestra.chat.long_text import PIECE
from palestra.chat.rendering import Renderer, long_text
from palestra.schemas.records import Ids


def encode_text(renderer: Renderer, text: str, room: int | None = None) -> Ids:
    """[P], with what the tokenizer puts in front of every text, if it does.

    Raises:
        TooManyTokens: there are more than `room`; found before all of a long text is tokenised.
    """
    text = text.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates
    tokenizer = _tokenizer(renderer)
    if room is None or len(text) <= PIECE:
        return np.asarray(tokenizer.encode(text), np.int32)
    before, after = _around(tokenizer)
    return np.asarray([*before, *long_text(renderer).encode(text, room), *after], np.int32)  # type: ignore[arg-type]  # by identity


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts in front of every text, and behind it."""
    whole, bare = list(tokenizer.encode("a")), list(tokenizer.encode("a", add_special_tokens=False))
    at = next(k for k in range(len(whole) - len(bare) + 1) if whole[k : k + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]


def vocabulary_size(renderer: Renderer) -> int:
    """Ids from this one on are no tokens."""
    tokenizer = _tokenizer(renderer)
    return len(tokenizer) if hasattr(tokenizer, "__len__") else int(tokenizer.vocab_size)


def _tokenizer(renderer: Renderer) -> Any:
    return renderer._tokenizer  # type: ignore[attr-defined]  # ours and each of the package have it
