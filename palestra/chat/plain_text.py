"""Text to ids that are never control tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from palestra.chat.control_text import ControlText, control_tokens

_CACHED_LENGTH = 4096  # characters; longer texts are not said twice often enough to be kept


def plain_encoder(tokenizer: Any) -> Callable[[str], tuple[int, ...]]:
    """A function from text to ids in which no text makes a control token."""
    encode = _encoder(tokenizer)
    cached = lru_cache(maxsize=4096)(encode)
    return lambda text: cached(text) if len(text) <= _CACHED_LENGTH else encode(text)


def _encoder(tokenizer: Any) -> Callable[[str], tuple[int, ...]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer that has no special tokens in text, such as ByteTokenizer
        return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
    control = ControlText(control_tokens(backend), backend)
    return lambda text: tuple(control.encode_plain(text))
