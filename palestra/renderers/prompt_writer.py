"""Builds the ids of a prompt piece by piece: texts, control tokens, and pictures with their positions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from palestra.renderers.control_text import plain_encoder
from palestra.renderers.long_text import PIECE, LongText, TooManyTokens
from palestra.renderers.picture_layout import PictureTokens
from palestra.threads import check_wanted
from palestra.types.calls import MediaSpan, TokenSequence
from palestra.types.messages import ChatMessage, ImagePart, TextPart

Tokens = tuple[int, ...]
Pieces = list[str | ImagePart | Tokens]  # texts without control tokens, pictures, and control tokens
_UNCHECKED = 16  # pieces after which a thread looks whether its caller is still there


class PromptWriter:
    """Writes prompts, or continuations after replies, with one tokenizer.

    Attributes:
        encode: turns a text into ids, without control tokens.
    """

    def __init__(self, tokenizer: Any, pictures: PictureTokens | None) -> None:
        """Create the writer of a tokenizer. Without `pictures` the model reads text only."""
        self.encode, self._pictures = plain_encoder(tokenizer), pictures
        # As arrays, which extend another one a hundred times faster than lists do. Longer texts rarely occur twice.
        self._encode_short = lru_cache(maxsize=4096)(lambda text: array("i", self.encode(text)))
        self._long = LongText(tokenizer, self.encode)

    def write(self, pieces: Pieces, room: int | None = None) -> TokenSequence:
        """Return the ids of pieces, int32 [N], with their pictures; no two texts follow one another.

        Raises:
            TooManyTokens: there are more than `room` ids; None: there is no limit.
            ValueError: a piece is a picture, and the model reads text only.
        """
        ids, media = array("i"), list[MediaSpan]()  # NumPy reads a list a hundred times slower
        for number, piece in enumerate(pieces, 1):
            if isinstance(piece, str):
                if len(piece) <= PIECE:
                    ids.extend(self._encode_short(piece))
                else:
                    ids.extend(self.encode(piece) if room is None else self._long.encode(piece, room - len(ids)))
            elif isinstance(piece, ImagePart):
                if self._pictures is None:
                    raise ValueError("this model reads text only, and a message has a picture")
                shown = self._pictures.ids(piece.digest)
                media.append(MediaSpan(len(ids), len(shown), piece.digest))
                ids.extend(shown)
            else:
                ids.extend(piece)
            if room is not None and len(ids) > room:
                raise TooManyTokens(len(ids))
            if number % _UNCHECKED == 0:
                check_wanted()
        return TokenSequence(np.array(ids, np.int32), tuple(media))


def pieces_of(message: ChatMessage) -> Pieces:
    """Return the texts and pictures of a message, in order."""
    return [part.text if isinstance(part, TextPart) else part for part in message.content]


def joined(pieces: Iterable[str | ImagePart | Tokens]) -> Pieces:
    """Merge adjacent texts: a token may span the boundary of two."""
    found: Pieces = []
    for piece in pieces:
        if found and isinstance(piece, str) and isinstance(last := found[-1], str):
            found[-1] = last + piece
        else:
            found.append(piece)
    return found


def refuse_pictures(message: ChatMessage) -> None:
    """Raise ValueError if a text-only message has a picture."""
    for part in message.content:
        if isinstance(part, ImagePart):
            raise ValueError(
                f"a message of role {message.role} has a picture; pictures are the user's, or a tool's result"
            )
