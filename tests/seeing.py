"""A renderer for models that see, for tests of what lies before the model: four placeholders stand for each picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.types.calls import MediaSpan, TokenSequence
from palestra.types.messages import ChatMessage, ImagePart, TextPart

PLACEHOLDER = "\x01"  # one byte, and so one token of `ByteTokenizer`
PER_PICTURE = 4


class SeeingRenderer(ChatMLRenderer):
    """Writes pictures as placeholders, and says where they are."""

    takes_images = True

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        super().__init__(self.tokenizer)

    def render(self, messages: Sequence[ChatMessage], tools: Any = (), room: int | None = None) -> TokenSequence:
        return _with_media(super().render(list(map(_written, messages)), tools, room), messages)

    def extend(
        self,
        prompt_ids: Callable[[], Any],
        completion_ids: Any,
        new_messages: Sequence[ChatMessage],
        tools: Any = (),
        room: int | None = None,
    ) -> TokenSequence | None:
        found = super().extend(prompt_ids, completion_ids, list(map(_written, new_messages)), tools, room)
        return None if found is None else _with_media(found, new_messages)


def _written(message: ChatMessage) -> ChatMessage:
    parts = (TextPart(text=PLACEHOLDER * PER_PICTURE) if isinstance(p, ImagePart) else p for p in message.content)
    return message.model_copy(update={"content": tuple(parts)})


def _with_media(found: TokenSequence, messages: Sequence[ChatMessage]) -> TokenSequence:
    digests = [part.digest for message in messages for part in message.content if isinstance(part, ImagePart)]
    (placeholder,) = ByteTokenizer().encode(PLACEHOLDER, add_special_tokens=False)
    starts = np.flatnonzero(found.ids == placeholder)[::PER_PICTURE].tolist()
    assert len(starts) == len(digests)
    return TokenSequence(found.ids, tuple(MediaSpan(s, PER_PICTURE, d) for s, d in zip(starts, digests, strict=True)))
