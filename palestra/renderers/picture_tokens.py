"""The ids that stand for a picture in a prompt, for one model and one place where pictures are found."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from palestra.renderers.picture_layout import PictureLayout
from palestra.types.pictures import Pictures


class PictureTokens:
    """Writes the placeholders of pictures.

    Attributes:
        layout: which control tokens stand for a picture of a given size.
        image_token: id of a placeholder.
    """

    def __init__(self, tokenizer: Any, layout: PictureLayout, pictures: Pictures) -> None:
        """Prepare to write pictures.

        Raises:
            ValueError: the tokenizer has no token for placeholders.
        """
        self.layout, self._tokenizer, self._pictures = layout, tokenizer, pictures
        # Not `tokenizer.encode`, which sets truncation first, and fails if another thread encodes at that moment.
        self._backend = tokenizer.backend_tokenizer
        self.image_token: int = tokenizer.convert_tokens_to_ids(layout.image_token)
        if self.image_token is None or self.image_token == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {layout.image_token}")
        self._encoded = lru_cache(maxsize=256)(self._encode)

    def ids(self, digest: str) -> tuple[int, ...]:
        """Return the ids that stand for a picture, [N].

        Raises:
            PalestraError: no picture has this digest, or it can't be decoded.
        """
        return self._encoded(self.layout.text(*self._pictures.size(digest)))

    def as_marked(self) -> PictureTokens:
        """Return a writer that writes for every picture what the chat template of the model does."""
        return _Marked(self._tokenizer, self.layout, self._pictures)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)


class _Marked(PictureTokens):
    """Writes pictures of unknown size, to compare a renderer with a template."""

    def ids(self, digest: str) -> tuple[int, ...]:
        return self._encoded(self.layout.marker)
