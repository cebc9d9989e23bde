"""Placeholder ids of pictures, for one model and one picture source."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from palestra.renderers.picture_layout import PictureLayout
from palestra.types.pictures import Pictures


class PictureTokens:
    """Writes the placeholders of pictures.

    Attributes:
        layout: control tokens of a picture of a given size.
        image_token: id of a placeholder.
    """

    def __init__(self, tokenizer: Any, layout: PictureLayout, pictures: Pictures) -> None:
        """Create the writer."""
        self.layout, self._tokenizer, self._pictures = layout, tokenizer, pictures
        # Not `tokenizer.encode`, which sets truncation first, and fails if another thread encodes at that moment.
        self._backend = tokenizer.backend_tokenizer
        self.image_token: int = tokenizer.convert_tokens_to_ids(layout.image_token)
        if self.image_token is None or self.image_token == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {layout.image_token}")
        self._encoded = lru_cache(maxsize=256)(self._encode)

    def ids(self, digest: str) -> tuple[int, ...]:
        """Return the ids of a picture's placeholders, [N]."""
        return self._encoded(self.layout.text(*self._pictures.size(digest)))

    def as_marked(self) -> PictureTokens:
        """Return a writer that writes the chat template's marker for every picture."""
        return _Marked(self._tokenizer, self.layout, self._pictures)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)


class _Marked(PictureTokens):
    """Writes pictures of unknown size, to compare a renderer with a template."""

    def ids(self, digest: str) -> tuple[int, ...]:
        return self._encoded(self.layout.marker)
