"""Builds the ids of a prompt piece by piece: texts, control tokens, and pictures with their positions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from palestra.renderers.long_text import PIECE, Encode, LongText, TooManyTokens
from palestra.renderers.picture_layout import PictureTokens
from palestra.threads import check_wanted
from palestra.types.calls import MediaSpan, TokenSequence
from palestra.types.messages import ChatMessage, ImagePart, TextPart

Pieces = list[str | ImagePart]  # of a turn, of which no two texts follow one another


class PromptWriter:
    """Writes one prompt, or a continuation after a reply."""

    def __init__(
        self,
        encode: Encode,
        long: LongText,
        pictures: PictureTokens | None,
        room: int | None,
        before: Sequence[int] = (),
    ) -> None:
        """Begin with the tokens `before`. `encode` turns a text without control tokens into ids; without `pictures` the
        model reads text only; `room` limits the tokens.
        """
        self._encode, self._long, self._pictures, self._room = encode, long, pictures, room
        self._ids, self._media = array("i", before), list[MediaSpan]()  # NumPy reads a list a hundred times slower

    def turn(self, pieces: Pieces, start: Iterable[int] = (), end: Iterable[int] = ()) -> None:
        """Append a turn: the tokens that start it, its texts and pictures, and the tokens that end it."""
        self._ids.extend(start)
        for piece in pieces:
            if isinstance(piece, ImagePart):
                if self._pictures is None:
                    raise ValueError("this model reads text only, and a message has a picture")
                shown = self._pictures.ids(piece.digest)
                self._media.append(MediaSpan(len(self._ids), len(shown), piece.digest))
                self._ids.extend(shown)
            elif self._room is None or len(piece) <= PIECE:
                self._ids.extend(self._encode(piece))
            else:
                self._ids.extend(self._long.encode(piece, max(self._room - len(self._ids), 0)))
        self._ids.extend(end)
        if self._room is not None and len(self._ids) > self._room:
            raise TooManyTokens(len(self._ids))
        check_wanted()

    def sequence(self, opening: Iterable[int] = ()) -> TokenSequence:
        """Return the result, int32 [N], with its pictures, and with the tokens that open the next turn."""
        self._ids.extend(opening)
        return TokenSequence(np.array(self._ids, np.int32), tuple(self._media))


def pieces_of(message: ChatMessage) -> Pieces:
    """Return the texts and pictures of a message, in order."""
    return [part.text if isinstance(part, TextPart) else part for part in message.content]


def joined(pieces: Iterable[str | ImagePart]) -> Pieces:
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
